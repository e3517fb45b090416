-- The tables. State rules stand here first: no code, ours or an operator's, can write a job that both waits and runs.

create sequence {schema}.job_ids;
-- Tokens are compared for equality only, so a session may keep some in hand.
create sequence {schema}.tokens cache 50;

-- One row per job; the current attempt, or the last, lives in it. Columns that are NULL for the ordinary job keep it
-- narrow. `ready`, `waiting` and `held` repeat the state as booleans: they are the predicates of the partial indexes,
-- and so the state itself stays unindexed and most updates can be HOT.
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
    waiting             boolean not null,
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
    ended_as            text,
    error_code          text,
    error_message       text,
    error_cause         text,
    error_details       jsonb,
    unique_key          text,
    live_key            text,
    enqueued_by         text,
    -- What a job is in each state, in one expression: it is looked at with every write.
    constraint whole_in_its_state check (
        case state
            when 'pending' then (ready <> waiting) and not held and token is null and worker_id is null
                                and finished_at is null and (ready or run_at is not null)
            when 'claimed' then held and not (ready or waiting) and token is not null and worker_id is not null
                                and claimed_at is not null and finished_at is null
            when 'running' then held and not (ready or waiting) and token is not null and worker_id is not null
                                and started_at is not null and finished_at is null
            when 'succeeded' then not (held or ready or waiting) and finished_at is not null
            when 'failed' then not (held or ready or waiting) and finished_at is not null and error_code is not null
            when 'cancelled' then not (held or ready or waiting) and finished_at is not null and error_code is not null
            when 'quarantined' then not (held or ready or waiting) and finished_at is not null and error_code is not null
            else false
        end),
    constraint key_lives_with_the_job check (
        unique_key is null or live_key is not distinct from case when finished_at is null then unique_key end),
    constraint no_key_without_a_name check (live_key is null or unique_key is not null),
    constraint counters_count check (least(attempt, failures, crash_count) >= 0)
) with (
    fillfactor = 70,
    -- Claims leave dead entries at the head of the index; they must not wait for a fifth of the table.
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.1
);
create index jobs_ready on {schema}.jobs (queue, rank, id) where ready;
create index jobs_waiting on {schema}.jobs (run_at) where waiting;
create index jobs_held on {schema}.jobs (worker_id) where held;
create unique index jobs_live_key on {schema}.jobs (live_key) where live_key is not null;
create index jobs_errors on {schema}.jobs (id) where error_code is not null;

-- Attempts that are over while their job goes on; the last one is in the job's row.
create table {schema}.attempts (
    job_id            bigint not null,
    token             bigint not null,
    worker_id         text not null,
    state             text not null check (state in ('succeeded', 'failed', 'crashed', 'drained', 'cancelled')),
    claimed_at        timestamptz,
    started_at        timestamptz,
    ended_at          timestamptz not null,
    last_heartbeat_at timestamptz,
    code              text,
    cause             text,
    primary key (job_id, token)
);

-- What a job printed, where it printed anything.
create table {schema}.outputs (
    job_id bigint not null,
    token  bigint not null,
    stdout bytea not null,
    stderr bytea not null,
    primary key (job_id, token)
);

-- Who a worker is and what was decided of it. Every turn locks this row for share, every verdict updates it.
create table {schema}.workers (
    id                    text primary key,
    name                  text not null,
    host                  text not null,
    pid                   integer not null,
    boot_id               text not null,
    pid_namespace         text not null,
    process_started       text not null,
    trace                 text not null,
    queues                text[] not null,
    tasks                 text[] not null,
    concurrency           integer not null,
    version               text not null,
    heartbeat_interval_s  double precision not null,
    suspect_after_s       double precision not null,
    running_stale_after_s double precision not null,
    state                 text not null default 'active' check (state in ('active', 'draining', 'suspect', 'dead', 'stopped')),
    draining              boolean not null default false,
    created_at            timestamptz not null,
    suspect_at            timestamptz,
    stopped_at            timestamptz,
    request               text check (request in ('drain', 'stop')),
    verdict               jsonb,
    metadata              jsonb not null,
    constraint suspect_since check ((suspect_at is not null) = (state = 'suspect')),
    constraint ended_at check ((stopped_at is not null) = (state in ('dead', 'stopped')))
) with (fillfactor = 70);

-- The beats: one narrow row per worker, no index on what changes, room on the page: every beat is HOT.
create table {schema}.beats (
    worker_id     text primary key,
    beat_at       timestamptz not null,
    session_start timestamptz,
    -- Which run of which server the session is of (`incarnation`): on another one it proves nothing.
    session_server text,
    processed     bigint not null default 0,
    session_pid   integer,
    running       integer not null default 0,
    cancels       boolean not null default false
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 500);

create table {schema}.queues (
    name      text primary key,
    paused    boolean not null default false,
    paused_by text,
    paused_at timestamptz
);

-- What the apps of the workers know, so that doors without the app can enqueue it.
create table {schema}.tasks (
    name     text primary key,
    queue    text not null,
    policy   bytea,
    is_async boolean not null
);

create table {schema}.events (
    id        bigint generated always as identity primary key,
    at        timestamptz not null default clock_timestamp(),
    kind      text not null,
    job_id    bigint,
    worker_id text,
    message   text not null,
    -- Ids are given before commits. Readers go on by transactions: which of them are open is known exactly.
    transaction_id xid8 not null default pg_current_xact_id()
);
create index events_in_order on {schema}.events (transaction_id, id);
create index events_job on {schema}.events (job_id, id) where job_id is not null;
create index events_worker on {schema}.events (worker_id, id) where worker_id is not null;

-- The right to do one round; it expires by itself, so nobody can hold it while frozen.
create table {schema}.tickets (
    name  text primary key,
    until timestamptz not null
) with (fillfactor = 50);

-- The intervals in which a reaper kept reaching the ledger. A missing heartbeat counts only within them: while nobody
-- could write, nobody was silent. The last row is the current one.
create table {schema}.watch_periods (
    id    bigint generated always as identity primary key,
    since timestamptz not null,
    until timestamptz not null,
    cause text not null check (cause in ('start', 'pause', 'outage', 'failover', 'clock')),
    -- How long no one watched before it, by the clock of then; null for the first.
    gap_s double precision,
    -- The last step back of the clock within it.
    set_back_s  double precision,
    set_back_at timestamptz,
    constraint goes_forward check (until >= since),
    constraint steps_are_dated check ((set_back_s is null) = (set_back_at is null))
) with (fillfactor = 50);

-- What concerns the ledger as a whole: which server was last watched.
create table {schema}.ledger (
    one           boolean primary key default true check (one),
    -- Which ledger this is. Whoever works with one takes no other for it.
    id            text not null default substr(replace(gen_random_uuid()::text, '-', ''), 1, 16),
    server        text,
    voided_at     timestamptz,
    -- The timeline on which numbers of jobs and attempts are given out (`skip_lost_numbers`).
    numbered_on   text not null default left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
) with (fillfactor = 50);
insert into {schema}.ledger default values;
