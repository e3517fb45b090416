-- The ledger on SQLite: one host, one file.
--
--   jobs         unstuck_jobs, _attempts, _outputs, _autopsies, _progress, _journal, _signals
--   workers      unstuck_workers, _worker_heartbeats, _hosts, _tasks, _listeners, _deferred_outcomes
--   order        unstuck_queues, _concurrency_keys, _unique_keys, _requests, _schedules
--   workflows    unstuck_workflows, _workflow_nodes, _workflow_edges, _node_jobs
--   events       unstuck_events, _alert_targets, _conditions, _counters, _audit
--   access       unstuck_api_tokens, _reply_addresses
--   the ledger   unstuck_ledger, _tickets, _watch_periods, _clock; unstuck_migrations is made by `migrate` itself
--   for people   worker_status, heartbeats, attempt_status
--
-- There are no schemas here, and an app that enqueues inside a transaction of its own keeps its tables in the same
-- file: the prefix leaves it names such as jobs, tasks and events. Only the views for people go without it.
--
-- Times named …_at are wall clock (seconds since 1970, UTC). Times named …_boot_s are seconds since the machine was
-- started and count time asleep. They mean something only together with the boot id. Leases are judged by the wall clock
-- within watch periods, so a clock that is set costs no worker its jobs.

-- Jobs ----------------------------------------------------------------------------------------------

-- One row per job; its last attempt lives in the row. What is read on every claim comes first; what may be long comes
-- after it, so that a scan over states and times never follows the overflow pages of a payload.
CREATE TABLE unstuck_jobs (
    id INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (
        state IN ('pending', 'claimed', 'running', 'waiting', 'succeeded', 'failed', 'cancelled', 'quarantined')
    ),
    ready INTEGER NOT NULL CHECK (ready IN (0, 1)),
    scheduled INTEGER NOT NULL CHECK (scheduled IN (0, 1)),
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
    -- How the last attempt ended, if the job's state does not say it.
    last_attempt_state TEXT,
    unique_key TEXT,
    active_key TEXT,
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
    -- Deaths that other jobs shared, so that it is not known whose doing they were: free, but not for ever.
    suspected_crashes INTEGER NOT NULL DEFAULT 0,
    -- It may have killed a process that it shared with others: it gets one of its own.
    run_alone INTEGER NOT NULL DEFAULT 0 CHECK (run_alone IN (0, 1)),
    -- Others are concerned when it ends: a workflow, a line, follow-up work, a journal, a signal.
    has_links INTEGER NOT NULL DEFAULT 0,
    -- Pending, and not admitted yet: as many jobs of its line are at work as may be.
    blocked INTEGER NOT NULL DEFAULT 0,
    concurrency_key TEXT,
    workflow_id INTEGER,
    place INTEGER,
    -- The tasks that follow its ends, by kind of end, as JSON.
    hooks TEXT,
    -- It wrote something down on its way, or was sent a signal: its next attempt needs that.
    journal INTEGER NOT NULL DEFAULT 0,
    -- The signal that it waits for.
    awaits_signal TEXT,
    expires_at REAL,
    -- How long it is kept after its end, if its task says so.
    retain_s REAL,
    -- It is given results of others with its claim.
    needs_inputs INTEGER,
    -- It was asked to stop with its workflow, and that was taken back: should it stop all the same, it is tried again.
    unstopped INTEGER,
    concurrency_limit INTEGER,
    -- What its unique key is good for: 'pending' until it is claimed, 'period' for a time (in `unstuck_unique_keys`), NULL
    -- until it ends.
    unique_for TEXT,
    CHECK (held = (state IN ('claimed', 'running'))),
    CHECK (ready + scheduled + blocked = (state = 'pending') OR state = 'waiting' AND ready + blocked = 0 AND (scheduled OR awaits_signal IS NOT NULL)),
    CHECK (held = 0 OR (token IS NOT NULL AND worker_id IS NOT NULL)),
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled', 'quarantined'))),
    CHECK (active_key IS NULL OR finished_at IS NULL)
) STRICT;

-- Predicates are booleans of their own: an entry moves only when the job becomes ready, held or waiting,
-- and finished jobs are in none of them, however many there are.
CREATE INDEX unstuck_jobs_ready ON unstuck_jobs (queue, rank, id) WHERE ready = 1;
CREATE INDEX unstuck_jobs_held ON unstuck_jobs (worker_id) WHERE held = 1;
CREATE INDEX unstuck_jobs_scheduled ON unstuck_jobs (queue, run_at) WHERE scheduled = 1;
CREATE UNIQUE INDEX unstuck_jobs_active_key ON unstuck_jobs (active_key) WHERE active_key IS NOT NULL;
CREATE INDEX unstuck_jobs_error ON unstuck_jobs (error_code, id) WHERE error_code IS NOT NULL;
CREATE INDEX unstuck_jobs_blocked ON unstuck_jobs (concurrency_key, rank, id) WHERE blocked = 1;
CREATE INDEX unstuck_jobs_awaiting_signal ON unstuck_jobs (id) WHERE awaits_signal IS NOT NULL;
CREATE INDEX unstuck_jobs_suspended ON unstuck_jobs (queue, scheduled) WHERE state = 'waiting';
-- The jobs that have a place in a line: admitted, and not at the end of an attempt yet. That is the count; there is no
-- other.
CREATE INDEX unstuck_jobs_in_concurrency_key ON unstuck_jobs (concurrency_key) WHERE concurrency_key IS NOT NULL AND (ready = 1 OR held = 1);
CREATE INDEX unstuck_jobs_expiring ON unstuck_jobs (expires_at)
WHERE expires_at IS NOT NULL AND (ready = 1 OR scheduled = 1 OR blocked = 1);
CREATE INDEX unstuck_jobs_kept ON unstuck_jobs (retain_s, finished_at) WHERE retain_s IS NOT NULL AND finished_at IS NOT NULL;

-- Earlier attempts, written when a job goes back to the queue.
CREATE TABLE unstuck_attempts (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('succeeded', 'failed', 'crashed', 'drained', 'cancelled', 'suspended')),
    claimed_at REAL,
    started_at REAL,
    ended_at REAL NOT NULL,
    code TEXT,
    cause TEXT,
    last_heartbeat_at REAL,
    PRIMARY KEY (job_id, token)
) STRICT, WITHOUT ROWID;

-- What attempts printed, if they printed anything.
CREATE TABLE unstuck_outputs (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    stdout BLOB NOT NULL,
    stderr BLOB NOT NULL,
    PRIMARY KEY (job_id, token)
) STRICT;

-- One per attempt that died or had to be ended, as JSON: it is read by people, and no rule decides by it.
CREATE TABLE unstuck_autopsies (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    body TEXT NOT NULL CHECK (json_valid(body)),
    PRIMARY KEY (job_id, token)
) STRICT;

-- One row per job that ever said how far it is, or whose interpreter fell silent; updated in place.
CREATE TABLE unstuck_progress (
    job_id INTEGER PRIMARY KEY REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    at REAL NOT NULL,
    done REAL,
    total REAL,
    message TEXT NOT NULL,
    -- Since when no Python code ran in its process; NULL while it does.
    busy_since REAL
) STRICT;

-- What jobs wrote down on their way.
CREATE TABLE unstuck_journal (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    -- Its place, from 1; 0 is the one that is written over.
    seq INTEGER NOT NULL CHECK (seq >= 0),
    kind TEXT NOT NULL CHECK (kind IN ('step', 'sleep', 'wait', 'signal', 'timeout', 'checkpoint')),
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    at REAL NOT NULL,
    -- The attempt that wrote it.
    token INTEGER NOT NULL,
    PRIMARY KEY (job_id, seq),
    CHECK ((seq = 0) = (kind = 'checkpoint'))
) STRICT;

-- The signals that were sent to jobs.
CREATE TABLE unstuck_signals (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    at REAL NOT NULL,
    sent_by TEXT NOT NULL,
    -- The entry by which the job took it; NULL while it is kept.
    taken_seq INTEGER,
    PRIMARY KEY (job_id, number)
) STRICT;

-- Workers -------------------------------------------------------------------------------------------

-- Who may hold jobs, with the verdict on them.
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
    -- The recovery settings by which it is judged; NULL: those of the process that judges it.
    recovery TEXT CHECK (recovery IS NULL OR json_valid(recovery)),
    metadata TEXT NOT NULL CHECK (json_valid(metadata)),
    wakeup_address TEXT NOT NULL,
    status_page TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'draining', 'suspect', 'dead', 'stopped')),
    -- What a suspect goes back to when it beats again.
    draining INTEGER NOT NULL DEFAULT 0 CHECK (draining IN (0, 1)),
    suspect_boot_s REAL,
    verdict TEXT CHECK (verdict IS NULL OR json_valid(verdict)),
    request TEXT CHECK (request IN ('drain', 'stop')),
    created_at REAL NOT NULL,
    stopped_at REAL,
    -- It is switched off, as JSON: reason, by, at, auto. NULL: it works.
    disabled TEXT CHECK (disabled IS NULL OR json_valid(disabled)),
    -- How it comes in. Over HTTP and ZeroMQ it may be in any language.
    transport TEXT NOT NULL DEFAULT 'python' CHECK (transport IN ('python', 'http', 'mdp')),
    -- The token that it came with: only its holder may speak for it.
    owner TEXT,
    CHECK ((stopped_at IS NOT NULL) = (state IN ('dead', 'stopped')))
) STRICT, WITHOUT ROWID;

-- A name is only a name, but a beat may come with nothing else: it must lead to one living worker.
CREATE UNIQUE INDEX unstuck_workers_living_name ON unstuck_workers (name)
WHERE transport <> 'python' AND state IN ('active', 'draining', 'suspect');
CREATE INDEX unstuck_workers_by_name ON unstuck_workers (name, created_at) WHERE transport <> 'python';
CREATE INDEX unstuck_workers_of_python ON unstuck_workers (name)
WHERE transport = 'python' AND state IN ('active', 'draining', 'suspect');

-- Proofs of life: narrow rows that are only ever updated.
CREATE TABLE unstuck_worker_heartbeats (
    worker_id TEXT PRIMARY KEY REFERENCES unstuck_workers (id) ON DELETE CASCADE,
    beat_at REAL NOT NULL,
    running INTEGER NOT NULL DEFAULT 0,
    processed INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- Disabled hosts. A worker that starts on one of them takes no jobs either.
CREATE TABLE unstuck_hosts (
    name TEXT PRIMARY KEY,
    disabled TEXT NOT NULL CHECK (json_valid(disabled))
) STRICT, WITHOUT ROWID;

-- What the apps of the workers know, so that doors without the app can enqueue it.
CREATE TABLE unstuck_tasks (
    name TEXT PRIMARY KEY,
    queue TEXT NOT NULL,
    policy BLOB,
    is_async INTEGER NOT NULL,
    seen_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Bells of processes that are no worker and want to hear every word: those that speak for foreign workers.
CREATE TABLE unstuck_listeners (address TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;

-- Attempts whose worker is done with them, and whose outcome a lock keeps from the ledger.
CREATE TABLE unstuck_deferred_outcomes (
    worker_id TEXT NOT NULL REFERENCES unstuck_workers (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    job_id INTEGER NOT NULL,
    -- Its code never began: it is on its way back to its queue.
    is_return INTEGER NOT NULL CHECK (is_return IN (0, 1)),
    reason TEXT NOT NULL,
    since REAL NOT NULL,
    -- Until when it counts without being repeated; NULL: as long as its worker lives.
    good_until REAL,
    PRIMARY KEY (worker_id, token)
) STRICT, WITHOUT ROWID;

-- Order ---------------------------------------------------------------------------------------------

CREATE TABLE unstuck_queues (
    name TEXT PRIMARY KEY,
    paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    changed_at REAL,
    changed_by TEXT,
    -- How many of its jobs may be in hand at once, and how many may be begun in a window of time: a bucket of that many
    -- tokens, which fills again in that time.
    concurrency INTEGER CHECK (concurrency >= 1),
    rate REAL CHECK (rate >= 1),
    rate_window_s REAL CHECK (rate_window_s > 0),
    tokens REAL,
    refilled_at REAL,
    -- The operator who chose them; NULL: an app did, or they were never chosen.
    limited_by TEXT
) STRICT, WITHOUT ROWID;

-- One row per line (concurrency key) that is in use.
CREATE TABLE unstuck_concurrency_keys (
    key TEXT PRIMARY KEY,
    places INTEGER NOT NULL DEFAULT 1 CHECK (places >= 1),
    -- An operator chose the number; what is enqueued later does not change it.
    pinned_by TEXT,
    changed_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Keys that are good for a period from their enqueue, however their job ended. A key stays when retention removes its job:
-- the period is a promise of its own, and `job_id` then names a job that is gone.
CREATE TABLE unstuck_unique_keys (
    key TEXT PRIMARY KEY,
    job_id INTEGER NOT NULL,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX unstuck_unique_keys_until ON unstuck_unique_keys (until);

-- Requests that must not be done twice: what was enqueued under an idempotency key, even after those jobs ended.
CREATE TABLE unstuck_requests (
    -- A hash of the caller and of their key: of one length whatever they chose, and apart from the keys of others.
    key BLOB PRIMARY KEY,
    -- A hash of what was asked for: the same key with something else is a mistake, and is refused.
    fingerprint BLOB NOT NULL,
    at REAL NOT NULL,
    -- [[job id, fresh], …]
    stored TEXT NOT NULL CHECK (json_valid(stored))
) STRICT, WITHOUT ROWID;

CREATE INDEX unstuck_requests_by_age ON unstuck_requests (at);

-- Schedules: what is enqueued again and again, and when next.
CREATE TABLE unstuck_schedules (
    name TEXT PRIMARY KEY,
    source TEXT NOT NULL CHECK (source IN ('app', 'operator')),
    -- Of the whole definition: only a process that has exactly this one fires it.
    fingerprint TEXT NOT NULL,
    task TEXT NOT NULL,
    queue TEXT NOT NULL,
    cron TEXT,
    every_s REAL,
    zone TEXT NOT NULL,
    catch_up TEXT NOT NULL CHECK (catch_up IN ('skip', 'latest', 'all')),
    -- The job of each tick, packed.
    job BLOB NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    paused_by TEXT,
    next_at REAL,
    last_at REAL,
    fired_at REAL,
    last_job_id INTEGER,
    -- Grows with every change: a process that fires must have read the last one.
    version INTEGER NOT NULL DEFAULT 1,
    changed_at REAL NOT NULL,
    CHECK ((cron IS NULL) <> (every_s IS NULL))
) STRICT, WITHOUT ROWID;

-- Workflows -----------------------------------------------------------------------------------------

-- Jobs that depend on each other. A workflow is stood for by a job of its own (place 0), which waits, holds no
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
-- Of one state, the newest first.
CREATE INDEX unstuck_workflows_by_state ON unstuck_workflows (state, id);

CREATE TABLE unstuck_workflow_nodes (
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

CREATE INDEX unstuck_workflow_nodes_inside ON unstuck_workflow_nodes (workflow_id, parent);

-- What the job of a node will be; of a map, those of its members. Beside the nodes, whose rows are written anew
-- whenever something happens to them, and column by column as in a job: it is enqueued without being unpacked.
CREATE TABLE unstuck_node_jobs (
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
    concurrency_key TEXT,
    concurrency_limit INTEGER,
    -- It gets results of others.
    needs_inputs INTEGER,
    hooks TEXT,
    expires_in_s REAL,
    retain_s REAL,
    policy BLOB,
    payload BLOB NOT NULL,
    PRIMARY KEY (workflow_id, place)
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_workflow_edges (
    workflow_id INTEGER NOT NULL REFERENCES unstuck_workflows (id) ON DELETE CASCADE,
    source INTEGER NOT NULL,
    target INTEGER NOT NULL,
    -- The target gets the source's result; otherwise it only comes after it.
    data INTEGER NOT NULL CHECK (data IN (0, 1)),
    PRIMARY KEY (workflow_id, source, target)
) STRICT, WITHOUT ROWID;

CREATE INDEX unstuck_workflow_edges_into ON unstuck_workflow_edges (workflow_id, target);

-- Events --------------------------------------------------------------------------------------------

CREATE TABLE unstuck_events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    job_id INTEGER,
    worker_id TEXT,
    message TEXT NOT NULL,
    -- What an event is about if it is neither a job nor a worker: a queue, a host.
    about TEXT
) STRICT;

CREATE INDEX unstuck_events_job ON unstuck_events (job_id, id) WHERE job_id IS NOT NULL;
CREATE INDEX unstuck_events_worker ON unstuck_events (worker_id, id) WHERE worker_id IS NOT NULL;
-- Alert senders look every second. What jobs go through day by day is not in here.
CREATE INDEX unstuck_events_to_tell ON unstuck_events (id) WHERE job_id IS NULL OR kind IN ('quarantined', 'workflow_paused');

-- Up to where each target of alerts was told.
CREATE TABLE unstuck_alert_targets (
    -- A fingerprint: an address holds secrets.
    target TEXT PRIMARY KEY,
    -- A cursor of the event stream: everything up to it was told, or is not to be told.
    position TEXT NOT NULL,
    -- Raised by every write: a decision on an older one is void.
    version INTEGER NOT NULL DEFAULT 1,
    state TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(state))
) STRICT, WITHOUT ROWID;

-- Which conditions hold.
CREATE TABLE unstuck_conditions (
    kind TEXT NOT NULL,
    about TEXT NOT NULL,
    message TEXT NOT NULL,
    seen_at REAL NOT NULL,
    -- NULL: seen, but not for long enough to be worth a word.
    begun_at REAL,
    reminded_at REAL,
    PRIMARY KEY (kind, about)
) STRICT, WITHOUT ROWID;

-- What was counted: jobs ended, deaths, how long things took. Added to in batches, a few times a minute.
CREATE TABLE unstuck_counters (
    -- Minutes since 1970; 0 holds the sums of all time.
    minute INTEGER NOT NULL,
    name TEXT NOT NULL,
    labels TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (minute, name, labels)
) STRICT, WITHOUT ROWID;

-- What operators did, through whichever door.
CREATE TABLE unstuck_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    transport TEXT NOT NULL,
    verb TEXT NOT NULL,
    target TEXT NOT NULL,
    -- NULL: it was begun, and its end is not known.
    outcome TEXT
) STRICT;

-- Access --------------------------------------------------------------------------------------------

-- Who may use the HTTP API.
CREATE TABLE unstuck_api_tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    -- The token itself is shown once and kept nowhere.
    hash BLOB NOT NULL UNIQUE,
    -- Signs logins; a reader of this table still lacks what only the token's holder can derive.
    seal BLOB NOT NULL,
    scopes TEXT NOT NULL CHECK (json_valid(scopes)),
    created_at REAL NOT NULL,
    created_by TEXT NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT, WITHOUT ROWID;

-- Where the answers to jobs go that came in through a broker.
CREATE TABLE unstuck_reply_addresses (
    job_id INTEGER PRIMARY KEY REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    -- The identity that the client chose: it must lead to this client alone, even after a restart.
    client BLOB NOT NULL CHECK (length(client) BETWEEN 16 AND 255),
    service TEXT NOT NULL,
    -- Groups the calls of one request.
    request_id TEXT NOT NULL,
    place INTEGER NOT NULL CHECK (place >= 0),
    places INTEGER NOT NULL CHECK (places > place),
    correlation BLOB,
    -- What the client calls this job.
    own_id TEXT,
    -- The client wants to hear of deaths.
    notify INTEGER NOT NULL CHECK (notify IN (0, 1)),
    answered_at REAL
) STRICT;

-- What was answered is not in here, however much there is of it.
CREATE INDEX unstuck_reply_addresses_unanswered ON unstuck_reply_addresses (client, job_id) WHERE answered_at IS NULL;

-- The ledger itself ---------------------------------------------------------------------------------

CREATE TABLE unstuck_ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    -- Which ledger this is. A process that works with one takes no other for it.
    id TEXT NOT NULL,
    last_job_id INTEGER NOT NULL DEFAULT 0,
    last_token INTEGER NOT NULL DEFAULT 0,
    -- Where the retention sweep goes on.
    swept_job_id INTEGER NOT NULL DEFAULT 0
) STRICT;

INSERT INTO unstuck_ledger (one, id) VALUES (1, lower(hex(randomblob(8))));

-- The right to do one round; it expires by itself, so a frozen process cannot keep it.
CREATE TABLE unstuck_tickets (
    name TEXT PRIMARY KEY,
    until_boot_s REAL NOT NULL,
    boot_id TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The intervals in which a reaper kept reaching the ledger. A missing heartbeat counts only within them: a worker that
-- could not write was not silent. The last row is the current one.
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

-- By how much the wall clock was ahead of the boot clock when a reaper last looked: less than that, and it was set back.
CREATE TABLE unstuck_clock (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    boot_id TEXT NOT NULL,
    ahead_s REAL NOT NULL
) STRICT;

-- Views for people and their tools; nothing in Unstuck decides by them -------------------------------

CREATE VIEW worker_status AS
SELECT
    w.id AS worker_id,
    w.state AS status,
    strftime('%Y-%m-%d %H:%M:%f', b.beat_at, 'unixepoch') AS last_seen_at,
    (SELECT count(*) FROM unstuck_jobs j WHERE j.held = 1 AND j.worker_id = w.id) AS active_tasks,
    -- By the Julian day: people read it with older copies of SQLite, whose unixepoch() knows no fractions.
    round(max(0.0, (julianday('now') - 2440587.5) * 1440.0 - b.beat_at / 60.0), 2) AS minutes_since_heartbeat,
    w.name AS name
FROM unstuck_workers w
JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id;

-- One row per held job. A worker beats once for all that it holds, so the rows are derived, and none is ever stored.
CREATE VIEW heartbeats AS
SELECT
    j.token AS id,
    j.id AS task_id,
    j.worker_id AS sender_id,
    CASE j.state WHEN 'running' THEN 'runner' ELSE 'claimer' END AS role,
    strftime('%Y-%m-%d %H:%M:%f', b.beat_at, 'unixepoch') AS sent_at,
    w.host AS hostname,
    w.pid AS pid,
    w.name AS sender_name
FROM unstuck_jobs j
JOIN unstuck_workers w ON w.id = j.worker_id
JOIN unstuck_worker_heartbeats b ON b.worker_id = j.worker_id
WHERE j.held = 1;

-- Every attempt of every job, the current one included. Only an attempt that goes on has a deadline for heartbeats.
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
    NULL AS heartbeat_deadline,
    a.started_at + j.timeout_s AS deadline
FROM unstuck_attempts a
JOIN unstuck_jobs j ON j.id = a.job_id
UNION ALL
SELECT
    j.id,
    j.token,
    j.worker_id,
    coalesce(j.last_attempt_state, j.state),
    j.claimed_at,
    j.started_at,
    j.finished_at,
    iif(j.held, NULL, j.error_code),
    iif(j.held, NULL, coalesce(j.error_cause, j.error_message)),
    min(b.beat_at, coalesce(j.finished_at, b.beat_at)),
    CASE
        WHEN j.held AND j.heartbeat THEN b.beat_at
            + iif(j.state = 'running', coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), w.suspect_after_s)
    END,
    j.started_at + j.timeout_s
FROM unstuck_jobs j
LEFT JOIN unstuck_workers w ON w.id = j.worker_id
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = j.worker_id
WHERE j.token IS NOT NULL;
