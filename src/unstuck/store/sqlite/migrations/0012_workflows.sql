-- Workflows: jobs that depend on each other. A workflow is stood for by a job of its own (place 0), which waits, holds no
-- slot, and ends with it; its id is that job's. A group is a scope: it ends when all that is in it has ended, or when
-- something in it failed that may not fail. Place 0 is the outermost one. A map is a group whose members are made when
-- its list is known.

CREATE TABLE unstuck_workflows (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'paused', 'succeeded', 'failed', 'cancelled')),
    created_at REAL NOT NULL,
    finished_at REAL,
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled')))
) STRICT;
CREATE INDEX unstuck_workflows_open ON unstuck_workflows (id) WHERE finished_at IS NULL;

CREATE TABLE unstuck_nodes (
    workflow_id INTEGER NOT NULL REFERENCES unstuck_workflows (id) ON DELETE CASCADE,
    place INTEGER NOT NULL CHECK (place >= 0),
    parent INTEGER,
    name TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('task', 'map', 'group')),
    state TEXT NOT NULL CHECK (state IN ('waiting', 'released', 'paused', 'succeeded', 'failed', 'cancelled')),
    on_error TEXT NOT NULL CHECK (on_error IN ('fail', 'continue', 'pause')),
    -- How many of those that it waits for have not ended well enough; of a scope, how many in it have not.
    blockers INTEGER NOT NULL CHECK (blockers >= 0),
    open INTEGER NOT NULL CHECK (open >= 0),
    -- Of a map, whose result is the list; of a group, whose result is its own.
    source INTEGER,
    -- Of a member of a map: which one it is, and its value, or the node whose result that is.
    item INTEGER,
    item_value BLOB,
    item_of INTEGER,
    job_id INTEGER,
    finished_at REAL,
    error TEXT CHECK (error IS NULL OR json_valid(error)),
    PRIMARY KEY (workflow_id, place),
    CHECK ((parent IS NULL) = (place = 0)),
    CHECK (kind = 'task' OR job_id IS NULL)
) STRICT, WITHOUT ROWID;
CREATE INDEX unstuck_nodes_inside ON unstuck_nodes (workflow_id, parent);

-- What the job of a node will be; of a map, those of its members. Beside the nodes, whose rows are written anew
-- whenever something happens to them, and column by column as in a job: it is enqueued without being unpacked.
CREATE TABLE unstuck_drafts (
    workflow_id INTEGER NOT NULL REFERENCES unstuck_workflows (id) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    queue TEXT NOT NULL,
    task TEXT NOT NULL,
    delay_s REAL NOT NULL CHECK (delay_s >= 0),
    on_crash TEXT,
    heartbeat INTEGER NOT NULL,
    heartbeat_timeout_s REAL,
    timeout_s REAL,
    enqueued_by TEXT,
    payload_type TEXT,
    line TEXT,
    line_limit INTEGER,
    -- It gets results of others.
    needs INTEGER,
    hooks TEXT,
    expires_in_s REAL,
    keep_s REAL,
    policy BLOB,
    payload BLOB NOT NULL,
    PRIMARY KEY (workflow_id, place)
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_edges (
    workflow_id INTEGER NOT NULL REFERENCES unstuck_workflows (id) ON DELETE CASCADE,
    source INTEGER NOT NULL,
    target INTEGER NOT NULL,
    -- The target gets the source's result; otherwise it only comes after it.
    data INTEGER NOT NULL CHECK (data IN (0, 1)),
    PRIMARY KEY (workflow_id, source, target)
) STRICT, WITHOUT ROWID;
CREATE INDEX unstuck_edges_into ON unstuck_edges (workflow_id, target);

-- It is given results of others with its claim.
ALTER TABLE unstuck_jobs ADD COLUMN needs INTEGER;
-- It was asked to stop with its workflow, and that was taken back: should it stop all the same, it is tried again.
ALTER TABLE unstuck_jobs ADD COLUMN unstopped INTEGER;

-- Of one state, the newest first.
CREATE INDEX unstuck_workflows_by_state ON unstuck_workflows (state, id);

-- Workflows that wait for an operator are told by alert, as quarantined jobs are.
DROP INDEX unstuck_events_to_tell;
CREATE INDEX unstuck_events_to_tell ON unstuck_events (id) WHERE job_id IS NULL OR kind IN ('quarantined', 'workflow_paused');
