-- The ledger on PostgreSQL: sequences, tables, indexes and views. The functions are in `functions/`.
--
--   jobs         jobs, attempts, outputs, autopsies, progress, journal, signals
--   workers      workers, worker_heartbeats, hosts, tasks, deferred_outcomes
--   order        queues, concurrency_keys, postponed_admissions, unique_keys, requests, schedules
--   workflows    workflows, workflow_nodes, workflow_edges, node_jobs
--   events       events, alert_targets, conditions, counters, audit
--   access       api_tokens, reply_addresses
--   the ledger   ledger, functions, tickets, watch_periods, retention_positions, clock; migrations is made by `migrate` itself
--   for people   worker_watch, held_jobs, attempt_status, worker_status, heartbeats
--
-- State rules stand here first: no code, ours or an operator's, can write a job that both waits and runs.
-- uses functions: watched_s

-- Jobs ----------------------------------------------------------------------------------------------

create sequence {schema}.job_ids;
-- Tokens are compared for equality only, so a session may keep some in hand.
create sequence {schema}.tokens cache 50;

-- One row per job; the current attempt, or the last, lives in it. Columns that are NULL for the ordinary job keep it
-- narrow. `ready`, `scheduled`, `held` and `blocked` repeat the state as booleans: they are the predicates of the partial
-- indexes, and so the state itself stays unindexed and most updates can be HOT.
create table {schema}.jobs (
    id                  bigint primary key,
    token               bigint,
    enqueued_at         timestamptz not null,
    run_at              timestamptz,
    claimed_at          timestamptz,
    started_at          timestamptz,
    finished_at         timestamptz,
    heartbeat_timeout_s double precision,
    timeout_s           double precision,
    rank                integer not null default 0,
    attempt             integer not null default 0,
    failures            integer not null default 0,
    crash_count         integer not null default 0,
    ready               boolean not null,
    scheduled             boolean not null,
    held                boolean not null default false,
    heartbeat           boolean,
    cancel_requested    boolean,
    state               text not null default 'pending',
    queue               text not null,
    task                text not null,
    payload             bytea not null,
    payload_type        text,
    policy              bytea,
    on_crash            text constraint on_crash_known check (on_crash = 'retry'),
    worker_id           text,
    result              bytea,
    last_attempt_state            text,
    error_code          text,
    error_message       text,
    error_cause         text,
    error_details       jsonb,
    unique_key          text,
    active_key            text,
    enqueued_by         text,
    -- Deaths that other jobs shared, so that it is not known whose doing they were: free, but not for ever.
    suspected_crashes          integer,
    -- It may have killed a process that it shared with others: it gets one of its own.
    run_alone               boolean,
    -- Others are concerned when it ends: a workflow, a line, follow-up work, a journal, a signal.
    has_links                boolean,
    -- Pending, and not admitted yet: as many jobs of its line are at work as may be.
    blocked             boolean,
    concurrency_key                text,
    workflow_id         bigint,
    place               integer,
    -- It is given results of others with its claim.
    needs_inputs               boolean,
    -- It was asked to stop with its workflow, and that was taken back: should it stop all the same, it is tried again.
    unstopped           boolean,
    -- The tasks that follow its ends, by kind of end.
    hooks               jsonb,
    -- It wrote something down on its way, or was sent a signal: its next attempt needs that.
    journal             boolean,
    -- The signal that it waits for.
    awaits_signal              text,
    expires_at          timestamptz,
    -- How long it is kept after its end, if its task says so.
    retain_s              double precision,
    concurrency_limit          integer,
    -- What its unique key is good for: 'pending' until it is claimed, 'period' for a time (in `unique_keys`), NULL until it
    -- ends.
    unique_for          text,
    -- What a job is in each state, in one expression: it is looked at with every write.
    constraint whole_in_its_state check (
        case state
            when 'pending' then (ready::integer + scheduled::integer + coalesce(blocked, false)::integer = 1) and not held
                                and token is null and worker_id is null and finished_at is null
                                and (not scheduled or run_at is not null)
                                and (not coalesce(blocked, false) or concurrency_key is not null)
            when 'waiting' then not (held or ready or coalesce(blocked, false)) and token is null and worker_id is null
                                and finished_at is null and (scheduled and run_at is not null or awaits_signal is not null)
            when 'claimed' then held and not (ready or scheduled or coalesce(blocked, false)) and token is not null
                                and worker_id is not null and claimed_at is not null and finished_at is null
            when 'running' then held and not (ready or scheduled or coalesce(blocked, false)) and token is not null
                                and worker_id is not null and started_at is not null and finished_at is null
            when 'succeeded' then not (held or ready or scheduled or coalesce(blocked, false)) and finished_at is not null
            when 'failed' then not (held or ready or scheduled or coalesce(blocked, false)) and finished_at is not null
                               and error_code is not null
            when 'cancelled' then not (held or ready or scheduled or coalesce(blocked, false)) and finished_at is not null
                                  and error_code is not null
            when 'quarantined' then not (held or ready or scheduled or coalesce(blocked, false)) and finished_at is not null
                                    and error_code is not null
            else false
        end),
    constraint key_lives_with_the_job check (
        unique_key is null or case unique_for
            when 'pending' then active_key is null or active_key = unique_key and finished_at is null
            when 'period' then active_key is null
            else active_key is not distinct from case when finished_at is null then unique_key end end),
    constraint no_key_without_a_name check (active_key is null or unique_key is not null),
    constraint place_in_a_workflow check ((workflow_id is null) = (place is null)),
    constraint counters_count check (least(attempt, failures, crash_count) >= 0)
) with (
    fillfactor = 70,
    -- Claims leave dead entries at the head of the index; they must not wait for a fifth of the table.
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.1
);
create index jobs_ready on {schema}.jobs (queue, rank, id) where ready;
create index jobs_scheduled on {schema}.jobs (run_at) where scheduled;
create index jobs_held on {schema}.jobs (worker_id) where held;
create index jobs_blocked on {schema}.jobs (concurrency_key, rank, id) where blocked;
create index jobs_awaiting_signal on {schema}.jobs (id) where awaits_signal is not null;
-- The jobs that have a place in a line: admitted, and not at the end of an attempt yet. That is the count; there is no
-- other.
create index jobs_in_concurrency_key on {schema}.jobs (concurrency_key) where concurrency_key is not null and (ready or held);
create index jobs_expiring on {schema}.jobs (expires_at)
    where expires_at is not null and (ready or scheduled or blocked);
create index jobs_kept on {schema}.jobs (retain_s, finished_at) where retain_s is not null and finished_at is not null;
create unique index jobs_active_key on {schema}.jobs (active_key) where active_key is not null;
create index jobs_errors on {schema}.jobs (id) where error_code is not null;

-- Attempts that are over while their job goes on; the last one is in the job's row.
create table {schema}.attempts (
    job_id            bigint not null,
    token             bigint not null,
    worker_id         text not null,
    state             text not null check (
        state in ('succeeded', 'failed', 'crashed', 'drained', 'cancelled', 'suspended')),
    claimed_at        timestamptz,
    started_at        timestamptz,
    ended_at          timestamptz not null,
    last_heartbeat_at timestamptz,
    code              text,
    cause             text,
    primary key (job_id, token)
);

-- What a job printed, if it printed anything.
create table {schema}.outputs (
    job_id bigint not null,
    token  bigint not null,
    stdout bytea not null,
    stderr bytea not null,
    primary key (job_id, token)
);

-- One per attempt that died or had to be ended: it is read by people, and no rule decides by it.
-- Removed with its job by `forget`: a foreign key would look for it with every job that is removed.
create table {schema}.autopsies (
    job_id bigint not null,
    token  bigint not null,
    body   jsonb not null,
    primary key (job_id, token)
);

-- One row per job that ever said how far it is, or whose interpreter fell silent; updated in place.
create table {schema}.progress (
    job_id     bigint primary key,
    token      bigint not null,
    at         double precision not null,
    done       double precision,
    total      double precision,
    message    text not null,
    -- Since when no Python code ran in its process; NULL while it does.
    busy_since double precision
) with (fillfactor = 50);

-- What jobs wrote down on their way.
create table {schema}.journal (
    job_id bigint not null,
    -- Its place, from 1; 0 is the one that is written over.
    seq    integer not null check (seq >= 0),
    kind   text not null check (kind in ('step', 'sleep', 'wait', 'signal', 'timeout', 'checkpoint')),
    name   text not null,
    value  bytea not null,
    at     timestamptz not null,
    -- The attempt that wrote it.
    token  bigint not null,
    primary key (job_id, seq),
    check ((seq = 0) = (kind = 'checkpoint'))
);

-- The signals that were sent to jobs.
create table {schema}.signals (
    job_id    bigint not null,
    number    integer not null,
    name      text not null,
    value     bytea not null,
    at        timestamptz not null,
    sent_by   text not null,
    -- The entry by which the job took it; NULL while it is kept.
    taken_seq integer,
    primary key (job_id, number)
);

-- Workers -------------------------------------------------------------------------------------------

-- Who a worker is and what was decided of it. Every turn locks this row for share, every verdict updates it.
create table {schema}.workers (
    id                    text primary key,
    name                  text not null,
    host                  text not null,
    pid                   integer not null,
    boot_id               text not null,
    pid_namespace         text not null,
    process_started       text not null,
    status_page                 text not null,
    queues                text[] not null,
    tasks                 text[] not null,
    concurrency           integer not null,
    version               text not null,
    heartbeat_interval_s  double precision not null,
    suspect_after_s       double precision not null,
    running_stale_after_s double precision not null,
    -- The recovery settings by which it is judged, as JSON; null: those of the process that judges it.
    recovery              text,
    state                 text not null default 'active' check (
        state in ('active', 'draining', 'suspect', 'dead', 'stopped')),
    draining              boolean not null default false,
    created_at            timestamptz not null,
    suspect_at            timestamptz,
    stopped_at            timestamptz,
    request               text check (request in ('drain', 'stop')),
    verdict               jsonb,
    metadata              jsonb not null,
    -- It is switched off: reason, by, at, auto. NULL: it works.
    disabled              jsonb,
    -- How it comes in. Over HTTP and ZeroMQ it may be in any language.
    transport                  text not null default 'python' constraint transport_known check (transport in ('python', 'http', 'mdp')),
    -- The token that it came with: only its holder may speak for it.
    owner                 text,
    constraint suspect_since check ((suspect_at is not null) = (state = 'suspect')),
    constraint ended_at check ((stopped_at is not null) = (state in ('dead', 'stopped')))
) with (fillfactor = 70);
-- A name is only a name, but a beat may come with nothing else: it must lead to one living worker.
create unique index workers_living_name on {schema}.workers (name)
    where transport <> 'python' and state in ('active', 'draining', 'suspect');
create index workers_by_name on {schema}.workers (name, created_at) where transport <> 'python';
create index workers_of_python on {schema}.workers (name)
    where transport = 'python' and state in ('active', 'draining', 'suspect');
-- Workers of other doors have no process on any host of ours.
-- Beats are in another table: this index changes with births and verdicts only.
create index workers_of_host on {schema}.workers (host, id)
    where state in ('active', 'draining', 'suspect') and transport = 'python';

-- The beats: one narrow row per worker, no index on what changes, room on the page: every beat is HOT.
create table {schema}.worker_heartbeats (
    worker_id      text primary key,
    beat_at        timestamptz not null,
    session_start  timestamptz,
    -- Which run of which server the session is of (`incarnation`): on another one it proves nothing.
    session_server text,
    processed      bigint not null default 0,
    session_pid    integer,
    running        integer not null default 0,
    cancels        boolean not null default false
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 500);

-- Disabled hosts. A worker that starts on one of them takes no jobs either.
create table {schema}.hosts (
    name     text primary key,
    disabled jsonb not null
);

-- What the apps of the workers know, so that doors without the app can enqueue it.
create table {schema}.tasks (
    name     text primary key,
    queue    text not null,
    policy   bytea,
    is_async boolean not null
);

-- Attempts whose worker is done with them, and whose outcome a lock of another session keeps from the ledger. No foreign
-- key to the job: its row may be what is locked.
create table {schema}.deferred_outcomes (
    worker_id  text not null references {schema}.workers (id) on delete cascade,
    token      bigint not null,
    job_id     bigint not null,
    -- Its code never began: it is on its way back to its queue.
    is_return  boolean not null,
    reason     text not null,
    since      timestamptz not null default clock_timestamp(),
    -- Until when it counts without being repeated; NULL: as long as its worker lives.
    good_until timestamptz,
    primary key (worker_id, token)
);

-- Order ---------------------------------------------------------------------------------------------

create table {schema}.queues (
    name          text primary key,
    paused        boolean not null default false,
    paused_by     text,
    paused_at     timestamptz,
    -- How many of its jobs may be in hand at once.
    concurrency   integer check (concurrency >= 1),
    -- How many may be begun in a window of time: a bucket of that many tokens, which fills again in that time.
    rate          double precision check (rate >= 1),
    rate_window_s double precision check (rate_window_s > 0),
    tokens        double precision,
    refilled_at   timestamptz,
    -- The operator who chose them; NULL: an app did, or they were never chosen.
    limited_by    text,
    constraint whole_rate check ((rate is null) = (rate_window_s is null))
);

-- One row per line (concurrency key) that is in use. A session that wants to admit a job locks it first.
create table {schema}.concurrency_keys (
    key        text primary key,
    places     integer not null default 1 check (places >= 1),
    -- An operator chose the number; what is enqueued later does not change it.
    pinned_by  text,
    changed_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Concurrency keys whose next job is to be admitted later: another session holds the row of the key or the next job, or the
-- transaction that gave a place back is a user's and stays open. Rows are only inserted and deleted, so no session waits here.
create table {schema}.postponed_admissions (
    id     bigint generated always as identity primary key,
    concurrency_key   text not null,
    -- The limit that a job wanted which joined, if any.
    places integer,
    -- Another session held the row of the key for longer than we wait.
    held   boolean not null,
    at     timestamptz not null default clock_timestamp()
);
create index postponed_admissions_key on {schema}.postponed_admissions (concurrency_key, id);

-- Keys that are good for a period from their enqueue, however their job ended. A key stays when retention removes its job:
-- the period is a promise of its own, and `job_id` then names a job that is gone.
create table {schema}.unique_keys (
    key    text primary key,
    job_id bigint not null,
    until  timestamptz not null
);
create index unique_keys_until on {schema}.unique_keys (until);

-- Requests that must not be done twice: what was enqueued under an idempotency key, even after those jobs ended.
create table {schema}.requests (
    -- A hash of the caller and of their key: of one length whatever they chose, and apart from the keys of others.
    key         bytea primary key,
    -- A hash of what was asked for: the same key with something else is a mistake, and is refused.
    fingerprint bytea not null,
    at          timestamptz not null default clock_timestamp(),
    job_ids     bigint[] not null,
    fresh       boolean[] not null
);
create index requests_by_age on {schema}.requests (at);

-- Schedules: what is enqueued again and again, and when next.
create table {schema}.schedules (
    name        text primary key,
    source      text not null check (source in ('app', 'operator')),
    -- Of the whole definition: only a process that has exactly this one fires it.
    fingerprint text not null,
    task        text not null,
    queue       text not null,
    cron        text,
    every_s     double precision,
    zone        text not null,
    catch_up    text not null check (catch_up in ('skip', 'latest', 'all')),
    -- The job of each tick, packed.
    job         bytea not null,
    paused      boolean not null default false,
    paused_by   text,
    next_at     timestamptz,
    last_at     timestamptz,
    fired_at    timestamptz,
    last_job_id bigint,
    -- Grows with every change: a process that fires must have read the last one.
    version     bigint not null default 1,
    changed_at  timestamptz not null default clock_timestamp(),
    check ((cron is null) <> (every_s is null))
);

-- Workflows -----------------------------------------------------------------------------------------

-- Jobs that depend on each other. A workflow is stood for by a job of its own (place 0), which waits, holds no slot, and
-- ends with it: so it can be waited for, cancelled and asked about as a job can. Its id is that job's. Nodes have places
-- from 1. A *group* is a scope: it ends when all that is in it has ended, or when something in it failed that may not
-- fail. Place 0 is the outermost one. A *map* is a group whose members are made when its list is known.
create table {schema}.workflows (
    id          bigint primary key,
    name        text not null,
    state       text not null default 'running' check (state in ('running', 'paused', 'succeeded', 'failed', 'cancelled')),
    created_at  timestamptz not null,
    finished_at timestamptz,
    constraint ended_when_finished check ((finished_at is not null) = (state in ('succeeded', 'failed', 'cancelled')))
) with (fillfactor = 70);
create index workflows_open on {schema}.workflows (id) where finished_at is null;
create index workflows_by_state on {schema}.workflows (state, id);

-- No foreign keys from here on: these rows are written with their workflow by `begin_workflow_v1` and removed with it by
-- `forget_workflows`, and to look for the workflow once more with every row was a third of the price of a start.
create table {schema}.workflow_nodes (
    workflow_id bigint not null,
    place       integer not null check (place >= 0),
    parent      integer,
    name        text not null,
    kind        text not null check (kind in ('task', 'map', 'group')),
    state       text not null check (state in ('waiting', 'released', 'paused', 'succeeded', 'failed', 'cancelled')),
    on_error    text not null check (on_error in ('fail', 'continue', 'pause')),
    -- How many of those that it waits for have not ended well enough.
    blockers    integer not null check (blockers >= 0),
    -- Of a scope: how many in it have not.
    open        integer not null check (open >= 0),
    -- Of a map, whose result is the list; of a group, whose result is its own.
    source      integer,
    -- Of a member of a map: which one it is, and its value, or the node whose result that is.
    item        integer,
    item_value  bytea,
    item_of     integer,
    job_id      bigint,
    finished_at timestamptz,
    error       jsonb,
    -- The request to stop its job was taken back while a session held that job: the job is still to be told (`unstop_v1`).
    unstop      boolean,
    primary key (workflow_id, place),
    constraint outermost check ((parent is null) = (place = 0)),
    constraint only_tasks_have_jobs check (kind = 'task' or job_id is null)
-- A node is written when it is released and when it ends. No index has a column that changes then, and there is room on
-- the page: both are HOT.
) with (fillfactor = 40);
-- The parent first: else a plan made for an empty table might look for a place by it, and read the whole workflow.
create index workflow_nodes_inside on {schema}.workflow_nodes (parent, workflow_id);

create table {schema}.workflow_edges (
    workflow_id bigint not null,
    source      integer not null,
    target      integer not null,
    -- The target gets the source's result; otherwise it only comes after it.
    data        boolean not null,
    primary key (workflow_id, source, target)
);
create index workflow_edges_into on {schema}.workflow_edges (workflow_id, target);

-- What the job of a node will be, or those of a map's members. Written once, beside the row that changes.
create table {schema}.node_jobs (
    workflow_id         bigint not null,
    place               integer not null,
    -- It gets results of others.
    needs_inputs               boolean,
    queue               text not null,
    task                text not null,
    payload             bytea not null,
    payload_type        text,
    policy              bytea,
    on_crash            text,
    heartbeat           boolean,
    heartbeat_timeout_s double precision,
    timeout_s           double precision,
    rank                integer,
    delay_s             double precision,
    enqueued_by         text,
    more                jsonb,
    primary key (workflow_id, place)
);

-- Events --------------------------------------------------------------------------------------------

create table {schema}.events (
    id             bigint generated always as identity primary key,
    at             timestamptz not null default clock_timestamp(),
    kind           text not null,
    job_id         bigint,
    worker_id      text,
    message        text not null,
    -- Ids are given before commits. Readers go on by transactions: which of them are open is known exactly.
    transaction_id xid8 not null default pg_current_xact_id(),
    -- What an event is about if it is neither a job nor a worker: a queue, a host.
    about          text
);
create index events_in_order on {schema}.events (transaction_id, id);
create index events_job on {schema}.events (job_id, id) where job_id is not null;
create index events_worker on {schema}.events (worker_id, id) where worker_id is not null;
-- Alert senders look every second. What jobs go through day by day is not in here.
create index events_to_tell on {schema}.events (transaction_id, id)
    where job_id is null or kind in ('quarantined', 'workflow_paused');

-- Up to where each target of alerts was told.
create table {schema}.alert_targets (
    -- A fingerprint: an address holds secrets.
    target   text primary key,
    -- A cursor of the event stream: everything up to it was told, or is not to be told.
    position text not null,
    -- Raised by every write: a decision on an older one is void.
    version  bigint not null default 1,
    state    text not null default '{}'
) with (fillfactor = 50);

-- Which conditions hold.
create table {schema}.conditions (
    kind        text not null,
    about       text not null,
    message     text not null,
    seen_at     timestamptz not null default clock_timestamp(),
    -- NULL: seen, but not for long enough to be worth a word.
    begun_at    timestamptz,
    reminded_at timestamptz,
    primary key (kind, about)
) with (fillfactor = 70);

-- What was counted: jobs ended, deaths, how long things took. Added to in batches, a few times a minute.
create table {schema}.counters (
    -- Minutes since 1970; 0 holds the sums of all time.
    minute bigint not null,
    name   text not null,
    labels text not null,
    -- Many add to the same counter at once: each to one of a few rows.
    slot   smallint not null,
    value  double precision not null,
    primary key (minute, name, labels, slot)
) with (fillfactor = 70);

-- What operators did, through whichever door.
create table {schema}.audit (
    id      bigint generated always as identity primary key,
    at      timestamptz not null default clock_timestamp(),
    by      text not null,
    transport    text not null,
    verb    text not null,
    target  text not null,
    -- NULL: it was begun, and its end is not known.
    outcome text
);

-- Access --------------------------------------------------------------------------------------------

-- Who may use the HTTP API.
create table {schema}.api_tokens (
    id         text primary key,
    name       text not null,
    -- The token itself is shown once and kept nowhere.
    hash       bytea not null unique,
    -- Signs logins; a reader of this table still lacks what only the token's holder can derive.
    seal       bytea not null,
    scopes     text[] not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    expires_at timestamptz,
    revoked_at timestamptz
);

-- Where the answers to jobs go that came in through a broker.
create table {schema}.reply_addresses (
    job_id      bigint primary key,
    -- The identity that the client chose: it must lead to this client alone, even after a restart.
    client      bytea not null constraint client_is_unique check (octet_length(client) between 16 and 255),
    service     text not null,
    -- Groups the calls of one request.
    request_id  text not null,
    place       integer not null check (place >= 0),
    places      integer not null check (places > place),
    correlation bytea,
    -- What the client calls this job.
    own_id      text,
    -- The client wants to hear of deaths.
    notify      boolean not null,
    answered_at timestamptz
);
-- What was answered is not in here, however much there is of it.
create index reply_addresses_unanswered on {schema}.reply_addresses (client, job_id) where answered_at is null;

-- The ledger itself ---------------------------------------------------------------------------------

-- What concerns the ledger as a whole: which server was last watched, and what its sessions prove.
create table {schema}.ledger (
    one                 boolean primary key default true check (one),
    -- Which ledger this is. A process that works with one takes no other for it.
    id                  text not null default substr(replace(gen_random_uuid()::text, '-', ''), 1, 16),
    server              text,
    voided_at           timestamptz,
    -- The timeline on which numbers of jobs and attempts are given out (`skip_lost_numbers_v1`).
    numbered_on         text not null default left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
    -- How many sessions of this database were terminated at the server, as of the last tick.
    sessions_terminated bigint,
    -- When a tick last found that a session may be missing though its worker lives (`tick_v1`).
    sessions_doubted_at timestamptz
) with (fillfactor = 50);
insert into {schema}.ledger default values;

-- Which text of each function of `functions/` is in place: `migrate` replaces those whose digest differs.
create table {schema}.functions (
    name       text primary key,
    digest     text not null,
    -- Its arguments and its result: a function is not replaced by one of another signature, but dropped first.
    signature  text not null,
    -- The newest migration known to the code that had this function last. It is dropped when no such code may run any more.
    number     integer not null,
    -- The version of Unstuck that put this text in place.
    version    text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- The right to do one round; it expires by itself, so a frozen process cannot keep it.
create table {schema}.tickets (
    name  text primary key,
    until timestamptz not null
) with (fillfactor = 50);

-- The intervals in which a reaper kept reaching the ledger. A missing heartbeat counts only within them: a worker that could
-- not write was not silent. The last row is the current one.
create table {schema}.watch_periods (
    id          bigint generated always as identity primary key,
    since       timestamptz not null,
    until       timestamptz not null,
    cause       text not null check (cause in ('start', 'pause', 'outage', 'failover', 'clock')),
    -- How long no one watched before it, by the clock of then; null for the first.
    gap_s       double precision,
    -- The last step back of the clock within it.
    set_back_s  double precision,
    set_back_at timestamptz,
    constraint goes_forward check (until >= since),
    constraint steps_are_dated check ((set_back_s is null) = (set_back_at is null))
) with (fillfactor = 50);

-- How far the walks of retention have come. Apart from `ledger`, whose row others may not be kept from.
create table {schema}.retention_positions (
    name        text primary key,
    -- A walk goes on behind this id.
    position    bigint not null default 0,
    -- The lowest id that this walk has left where it is. The next walk begins there: rows that are dead, and that an old
    -- snapshot keeps vacuum from removing, are not read again with every walk.
    lowest_left bigint,
    -- When a walk last began at the lowest id of all: an id may be committed later than those behind it.
    whole_at    timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- What the clock said when a reaper last looked.
create table {schema}.clock (
    one boolean primary key default true check (one),
    at  timestamptz not null
) with (fillfactor = 50);

-- Views: what people and the rules read -------------------------------------------------------------

-- `counted_s` is the silence that counts against a worker. `silent_s` is for people: as if the watch went on until now.
create view {schema}.worker_watch as
select w.id as worker_id, w.state, w.host, w.suspect_after_s, w.running_stale_after_s,
       b.beat_at, b.running, b.processed, b.session_pid, b.session_start,
       c.counted_s
           + greatest(0, extract(epoch from clock_timestamp() - greatest(b.beat_at, p.until)))::double precision as silent_s,
       c.counted_s
from {schema}.workers w
join {schema}.worker_heartbeats b on b.worker_id = w.id
left join lateral (select l.since, l.until from {schema}.watch_periods l order by l.id desc limit 1) p on true
cross join lateral (
    -- Nearly all of them were heard in the current period.
    select case when b.beat_at >= p.since then greatest(0, extract(epoch from p.until - b.beat_at))::double precision
                else {schema}.watched_s(b.beat_at) end as counted_s
) c;

-- Every job that a worker holds, with what the rules need to judge it.
create view {schema}.held_jobs as
select j.id as job_id, j.token, j.worker_id, j.state, j.task, j.queue, coalesce(j.policy, ''::bytea) as policy,
       j.failures, j.crash_count as crashes, coalesce(j.cancel_requested, false) as cancel_requested, j.timeout_s,
       case when coalesce(j.heartbeat, true) then coalesce(j.heartbeat_timeout_s, v.running_stale_after_s) end
           as heartbeat_timeout_s,
       extract(epoch from clock_timestamp() - j.claimed_at)::double precision as held_s,
       coalesce(extract(epoch from clock_timestamp() - j.started_at), 0)::double precision as running_s,
       coalesce(v.silent_s, 'infinity'::double precision) as silent_s,
       coalesce(v.state, 'dead') as worker_state,
       coalesce(j.suspected_crashes, 0) as suspected_crashes,
       exists (select 1 from {schema}.deferred_outcomes d
               where d.worker_id = j.worker_id and d.token = j.token
                 and (d.good_until is null or d.good_until > clock_timestamp())) as deferred
from {schema}.jobs j
left join {schema}.worker_watch v on v.worker_id = j.worker_id
where j.held;

-- All attempts, oldest first by token within a job; beats do not rewrite attempts, so the deadlines are computed.
create view {schema}.attempt_status as
select a.job_id, a.token, a.worker_id, a.state, a.claimed_at, a.started_at, a.ended_at, a.code, a.cause,
       a.last_heartbeat_at, null::timestamptz as heartbeat_deadline,
       a.started_at + make_interval(secs => j.timeout_s) as deadline
from {schema}.attempts a
join {schema}.jobs j on j.id = a.job_id
union all
select j.id, j.token, j.worker_id, coalesce(j.last_attempt_state, j.state), j.claimed_at, j.started_at, j.finished_at,
       case when j.finished_at is not null then j.error_code end,
       case when j.finished_at is not null then coalesce(j.error_cause, j.error_message) end,
       least(b.beat_at, j.finished_at),
       case when j.held and coalesce(j.heartbeat, true) then b.beat_at + make_interval(secs =>
           case when j.state = 'running' then coalesce(j.heartbeat_timeout_s, w.running_stale_after_s)
                else w.suspect_after_s end) end,
       j.started_at + make_interval(secs => j.timeout_s)
from {schema}.jobs j
left join {schema}.workers w on w.id = j.worker_id
left join {schema}.worker_heartbeats b on b.worker_id = j.worker_id
where j.token is not null;

create view {schema}.worker_status as
select v.worker_id, v.state as status, v.beat_at as last_seen_at,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = v.worker_id) as active_tasks,
       round(greatest(0, extract(epoch from clock_timestamp() - v.beat_at)) / 60, 2) as minutes_since_heartbeat,
       w.name
from {schema}.worker_watch v
join {schema}.workers w on w.id = v.worker_id;

-- One row per held job, derived from the beat of its holder: no table grows by heartbeats.
create view {schema}.heartbeats as
select j.token as id, j.id as task_id, j.worker_id as sender_id,
       case j.state when 'claimed' then 'claimer' else 'runner' end as role,
       b.beat_at as sent_at, w.host as hostname, w.pid, w.name as sender_name
from {schema}.jobs j
join {schema}.workers w on w.id = j.worker_id
join {schema}.worker_heartbeats b on b.worker_id = j.worker_id
where j.held;
