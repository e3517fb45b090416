-- The ledger on SQLite: one host, one file.
--
--   unstuck_jobs      one row per job; its last attempt lives in the row
--   unstuck_attempts  earlier attempts, written when a job goes back to the queue
--   unstuck_outputs   what attempts printed, where they printed anything
--   unstuck_workers   who may hold jobs, with the verdict on them
--   unstuck_beats     proofs of life: narrow rows that are only ever updated
--   unstuck_queues, unstuck_tasks, unstuck_events, unstuck_tickets, unstuck_ledger
--
-- There are no schemas here, and whoever enqueues inside a transaction of their own keeps their tables in the same
-- file: the prefix leaves them names such as jobs, tasks and events. Only the views for people go without it.
--
-- Times named …_at are wall clock (seconds since 1970, UTC). Times named …_boot_s are seconds since the machine was
-- started and count time asleep. They mean something only together with the boot id. Leases are judged by the wall clock
-- within watch periods, so a clock that is set costs no worker its jobs.

CREATE TABLE unstuck_ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    -- Which ledger this is. Whoever works with one takes no other for it.
    id TEXT NOT NULL,
    last_job_id INTEGER NOT NULL DEFAULT 0,
    last_token INTEGER NOT NULL DEFAULT 0,
    -- Where the retention sweep goes on.
    swept_job_id INTEGER NOT NULL DEFAULT 0
) STRICT;

INSERT INTO unstuck_ledger (one, id) VALUES (1, lower(hex(randomblob(8))));

-- What is read on every claim comes first; what may be long comes last, so that a scan over states and times
-- never follows the overflow pages of a payload.
CREATE TABLE unstuck_jobs (
    id INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (
        state IN ('pending', 'claimed', 'running', 'succeeded', 'failed', 'cancelled', 'quarantined')
    ),
    ready INTEGER NOT NULL CHECK (ready IN (0, 1)),
    waiting INTEGER NOT NULL CHECK (waiting IN (0, 1)),
    held INTEGER NOT NULL CHECK (held IN (0, 1)),
    rank INTEGER NOT NULL,
    queue TEXT NOT NULL,
    task TEXT NOT NULL,
    run_at REAL NOT NULL,
    token INTEGER,
    worker_id TEXT,
    attempt INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    failures INTEGER NOT NULL DEFAULT 0,
    crash_count INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0 CHECK (cancel_requested IN (0, 1)),
    -- NULL: 'fail'.
    on_crash TEXT CHECK (on_crash = 'retry'),
    heartbeat INTEGER NOT NULL DEFAULT 1 CHECK (heartbeat IN (0, 1)),
    heartbeat_timeout_s REAL,
    timeout_s REAL,
    enqueued_at REAL NOT NULL,
    claimed_at REAL,
    started_at REAL,
    started_boot_s REAL,
    finished_at REAL,
    -- How the last attempt ended, where the job's state does not say it.
    ended_as TEXT,
    unique_key TEXT,
    live_key TEXT,
    enqueued_by TEXT,
    -- NULL: 'json'.
    payload_type TEXT,
    error_code TEXT,
    error_message TEXT,
    error_cause TEXT,
    error_details TEXT,
    policy BLOB,
    result BLOB,
    payload BLOB NOT NULL,
    CHECK (held = (state IN ('claimed', 'running'))),
    CHECK (ready + waiting = (state = 'pending')),
    CHECK (held = 0 OR (token IS NOT NULL AND worker_id IS NOT NULL)),
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled', 'quarantined'))),
    CHECK (live_key IS NULL OR finished_at IS NULL)
) STRICT;

-- Predicates are booleans of their own: an entry moves only when the job becomes ready, held or waiting,
-- and finished jobs are in none of them, however many there are.
CREATE INDEX unstuck_jobs_ready ON unstuck_jobs (queue, rank, id) WHERE ready = 1;
CREATE INDEX unstuck_jobs_held ON unstuck_jobs (worker_id) WHERE held = 1;
CREATE INDEX unstuck_jobs_waiting ON unstuck_jobs (queue, run_at) WHERE waiting = 1;
CREATE UNIQUE INDEX unstuck_jobs_live_key ON unstuck_jobs (live_key) WHERE live_key IS NOT NULL;
CREATE INDEX unstuck_jobs_error ON unstuck_jobs (error_code, id) WHERE error_code IS NOT NULL;

CREATE TABLE unstuck_attempts (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('succeeded', 'failed', 'crashed', 'drained', 'cancelled')),
    claimed_at REAL,
    started_at REAL,
    ended_at REAL NOT NULL,
    code TEXT,
    cause TEXT,
    last_heartbeat_at REAL,
    PRIMARY KEY (job_id, token)
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_outputs (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    stdout BLOB NOT NULL,
    stderr BLOB NOT NULL,
    PRIMARY KEY (job_id, token)
) STRICT;

CREATE TABLE unstuck_workers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    pid_namespace TEXT NOT NULL,
    process_started TEXT NOT NULL,
    queues TEXT NOT NULL CHECK (json_valid(queues)),
    tasks TEXT NOT NULL CHECK (json_valid(tasks)),
    concurrency INTEGER NOT NULL,
    version TEXT NOT NULL,
    heartbeat_interval_s REAL NOT NULL,
    suspect_after_s REAL NOT NULL,
    running_stale_after_s REAL NOT NULL,
    metadata TEXT NOT NULL CHECK (json_valid(metadata)),
    bell TEXT NOT NULL,
    trace TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'draining', 'suspect', 'dead', 'stopped')),
    -- What a suspect goes back to when it beats again.
    draining INTEGER NOT NULL DEFAULT 0 CHECK (draining IN (0, 1)),
    suspect_boot_s REAL,
    verdict TEXT CHECK (verdict IS NULL OR json_valid(verdict)),
    request TEXT CHECK (request IN ('drain', 'stop')),
    created_at REAL NOT NULL,
    stopped_at REAL,
    CHECK ((stopped_at IS NOT NULL) = (state IN ('dead', 'stopped')))
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_beats (
    worker_id TEXT PRIMARY KEY REFERENCES unstuck_workers (id) ON DELETE CASCADE,
    beat_at REAL NOT NULL,
    running INTEGER NOT NULL DEFAULT 0,
    processed INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The intervals in which a reaper kept reaching the ledger. A missing heartbeat counts only within them: while nobody
-- could write, nobody was silent. The last row is the current one.
CREATE TABLE unstuck_watch_periods (
    id INTEGER PRIMARY KEY,
    since REAL NOT NULL,
    until REAL NOT NULL CHECK (until >= since),
    cause TEXT NOT NULL CHECK (cause IN ('start', 'pause', 'outage', 'failover', 'clock')),
    -- How long no one watched before it, by the clock of then; NULL for the first.
    gap_s REAL,
    -- The last step back of the clock within it.
    set_back_s REAL,
    set_back_at REAL,
    CHECK ((set_back_s IS NULL) = (set_back_at IS NULL))
) STRICT;

CREATE TABLE unstuck_queues (
    name TEXT PRIMARY KEY,
    paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    changed_at REAL,
    changed_by TEXT
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_tasks (
    name TEXT PRIMARY KEY,
    queue TEXT NOT NULL,
    policy BLOB,
    is_async INTEGER NOT NULL,
    seen_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    job_id INTEGER,
    worker_id TEXT,
    message TEXT NOT NULL
) STRICT;

CREATE INDEX unstuck_events_job ON unstuck_events (job_id, id) WHERE job_id IS NOT NULL;
CREATE INDEX unstuck_events_worker ON unstuck_events (worker_id, id) WHERE worker_id IS NOT NULL;

CREATE TABLE unstuck_tickets (
    name TEXT PRIMARY KEY,
    until_boot_s REAL NOT NULL,
    boot_id TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- For people and their tools; nothing in Unstuck decides by them.

CREATE VIEW worker_status AS
SELECT
    w.id AS worker_id,
    w.state AS status,
    strftime('%Y-%m-%d %H:%M:%f', b.beat_at, 'unixepoch') AS last_seen_at,
    (SELECT count(*) FROM unstuck_jobs j WHERE j.held = 1 AND j.worker_id = w.id) AS active_tasks,
    (unixepoch('subsec') - b.beat_at) / 60.0 AS minutes_since_heartbeat
FROM unstuck_workers w
JOIN unstuck_beats b ON b.worker_id = w.id;

-- One row per held job. A worker beats once for all that it holds, so the rows are derived, and none is ever stored.
CREATE VIEW heartbeats AS
SELECT
    j.token AS id,
    j.id AS task_id,
    j.worker_id AS sender_id,
    CASE j.state WHEN 'running' THEN 'runner' ELSE 'claimer' END AS role,
    strftime('%Y-%m-%d %H:%M:%f', b.beat_at, 'unixepoch') AS sent_at,
    w.host AS hostname,
    w.pid AS pid
FROM unstuck_jobs j
JOIN unstuck_workers w ON w.id = j.worker_id
JOIN unstuck_beats b ON b.worker_id = j.worker_id
WHERE j.held = 1;

-- Every attempt of every job, the current one included.
CREATE VIEW attempt_status AS
SELECT
    a.job_id,
    a.token,
    a.worker_id,
    a.state,
    a.claimed_at,
    a.started_at,
    a.ended_at,
    a.code,
    a.cause,
    a.last_heartbeat_at,
    CASE j.heartbeat
        WHEN 1 THEN a.last_heartbeat_at + coalesce(j.heartbeat_timeout_s, w.running_stale_after_s)
    END AS heartbeat_deadline,
    a.started_at + j.timeout_s AS deadline
FROM unstuck_attempts a
JOIN unstuck_jobs j ON j.id = a.job_id
LEFT JOIN unstuck_workers w ON w.id = a.worker_id
UNION ALL
SELECT
    j.id,
    j.token,
    j.worker_id,
    coalesce(j.ended_as, j.state),
    j.claimed_at,
    j.started_at,
    j.finished_at,
    iif(j.held, NULL, j.error_code),
    iif(j.held, NULL, coalesce(j.error_cause, j.error_message)),
    min(b.beat_at, coalesce(j.finished_at, b.beat_at)),
    CASE j.heartbeat
        WHEN 1
            THEN min(b.beat_at, coalesce(j.finished_at, b.beat_at))
                + coalesce(j.heartbeat_timeout_s, w.running_stale_after_s)
    END,
    j.started_at + j.timeout_s
FROM unstuck_jobs j
LEFT JOIN unstuck_workers w ON w.id = j.worker_id
LEFT JOIN unstuck_beats b ON b.worker_id = j.worker_id
WHERE j.token IS NOT NULL;
