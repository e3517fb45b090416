-- What a worker says of itself, and its turn of the wheel.

-- name: register
-- Repeated after a lost answer it changes nothing, and never raises the dead. Nor does it for a second living foreign
-- worker of the same name. The second answer is false if a living worker of the other kind has the name.
with free as materialized (
    select {schema}.worker_name_is_free_v1(%(name)s, %(door)s = 'python') as yes
), born as (
    insert into {schema}.workers (
        id, name, host, pid, boot_id, pid_namespace, process_started, status_page, queues, tasks, concurrency, version,
        heartbeat_interval_s, suspect_after_s, running_stale_after_s, transport, owner, recovery, metadata,
        created_at)
    select
        %(id)s, %(name)s, %(host)s, %(pid)s, %(boot_id)s, %(pid_namespace)s, %(process_started)s, %(trace)s, %(queues)s,
        %(tasks)s, %(concurrency)s, %(version)s, %(heartbeat_interval_s)s, %(suspect_after_s)s,
        %(running_stale_after_s)s, %(door)s, %(owner)s, %(recovery)s, %(metadata)s::jsonb, clock_timestamp()
    from free f where f.yes
    on conflict do nothing
    returning id, name, pid, host, transport
), first_beat as (
    insert into {schema}.worker_heartbeats (worker_id, beat_at, session_pid, session_start, session_server)
    -- Never before the last tick of a reaper: a clock that was set back and that no reaper has seen yet would make it a
    -- heartbeat of long ago.
    select b.id, greatest(clock_timestamp(), (select p.until from {schema}.watch_periods p order by p.id desc limit 1)),
           %(session_pid)s::integer, %(session_start)s::timestamptz, %(session_server)s
    from born b
), known as (
    insert into {schema}.tasks (name, queue, policy, is_async)
    select u.name, u.queue, nullif(u.policy, ''::bytea), u.is_async
    from unnest(%(tasks)s::text[], %(task_queues)s::text[], %(task_policies)s::bytea[], %(task_async)s::boolean[])
        as u(name, queue, policy, is_async)
    where exists (select 1 from born)
    order by u.name
    on conflict (name) do update set queue = excluded.queue, policy = excluded.policy, is_async = excluded.is_async
    where (tasks.queue, tasks.policy, tasks.is_async) is distinct from (excluded.queue, excluded.policy, excluded.is_async)
), told as (
    insert into {schema}.events (kind, worker_id, message)
    select 'worker_started', b.id,
           case b.transport when 'python' then format('Worker started: %%s (pid %%s on %%s)', b.name, b.pid, b.host)
                       else format('Worker started: %%s (over %%s, on %%s)', b.name, b.transport, b.host) end
    from born b
)
select exists (select 1 from {schema}.hosts h where h.name = %(host)s),
       f.yes or exists (select 1 from {schema}.workers w where w.id = %(id)s)
from free f;

-- name: skip_lost_numbers
-- Before anything else on a connection: numbers that a lost primary gave out must not be given out again.
select {schema}.skip_lost_numbers_v1();

-- name: stamp_session
-- After a reconnect, so that the lost session is not taken for a lost worker. It is no beat.
update {schema}.worker_heartbeats set session_pid = %(session_pid)s, session_start = %(session_start)s, session_server = %(session_server)s
where worker_id = %(worker_id)s
returning worker_id;

-- name: beat
select state, was_suspect, request, cancel_ids, cancel_tokens, {schema}.is_disabled_v1(%(worker_id)s)
from {schema}.beat_v1(%(worker_id)s, %(running)s, %(processed)s, %(metadata)s, %(session_pid)s, %(session_start)s, %(session_server)s);

-- name: turn
select job_id, token, task, queue, running, payload, payload_type, policy, failures, crashes, attempt, suspected_crashes, run_alone,
       due_in_s, kind, extras
from {schema}.turn_v1(
    %(worker_id)s, %(done_ids)s, %(done_tokens)s, %(done_results)s, %(start_ids)s, %(start_tokens)s, %(endings)s,
    %(releases)s, %(output_ids)s, %(output_tokens)s, %(stdouts)s, %(stderrs)s, %(queues)s, %(tasks)s, %(limit)s,
    %(run_ahead)s, %(start)s, %(gaps)s, %(entries)s, %(follow)s);

-- name: payloads
select id, payload from {schema}.jobs where id = any (%(ids)s);

-- name: note_progress
-- Only of attempts that this worker still runs. A job that somebody has in hand just now is ending: what it says is late.
-- To wait for it (as the foreign key would) while holding another is a deadlock with a turn that ends both.
insert into {schema}.progress as p (job_id, token, at, done, total, message, busy_since)
select u.job_id, u.token, u.at, u.done, u.total, u.message, u.busy_since
from unnest(%(job_ids)s::bigint[], %(tokens)s::bigint[], %(ats)s::float8[], %(dones)s::float8[], %(totals)s::float8[],
            %(messages)s::text[], %(busy)s::float8[])
     as u(job_id, token, at, done, total, message, busy_since)
join {schema}.jobs j on j.id = u.job_id
where coalesce(j.token = u.token and j.worker_id = %(worker_id)s and j.state = 'running', false)
for key share of j skip locked
on conflict (job_id) do update set
    token = excluded.token, at = excluded.at, done = excluded.done, total = excluded.total, message = excluded.message,
    busy_since = excluded.busy_since
returning p.job_id;

-- name: note_deferred
-- Whatever was noted of this worker and is over is removed on the way, so the table stays small.
with gone as (
    delete from {schema}.deferred_outcomes d
    where d.worker_id = %(worker_id)s
      and not exists (select 1 from {schema}.jobs j where j.id = d.job_id and j.held and j.token = d.token)
)
insert into {schema}.deferred_outcomes as d (worker_id, token, job_id, is_return, reason, good_until)
select w.id, u.token, u.job_id, u.is_return, u.reason,
       clock_timestamp() + make_interval(secs => %(good_for_s)s::double precision)
from unnest(%(job_ids)s::bigint[], %(tokens)s::bigint[], %(returns)s::boolean[], %(reasons)s::text[])
     as u(job_id, token, is_return, reason)
join {schema}.workers w on w.id = %(worker_id)s
on conflict (worker_id, token) do update set reason = excluded.reason, good_until = excluded.good_until
returning d.token;

-- name: drain
update {schema}.workers set draining = true, state = case state when 'active' then 'draining' else state end
where id = %(worker_id)s and state in ('active', 'suspect')
returning id;

-- name: retire
with gone as (
    update {schema}.workers set state = 'stopped', suspect_at = null, stopped_at = clock_timestamp()
    where id = %(worker_id)s and state in ('active', 'draining', 'suspect')
    returning id
)
insert into {schema}.events (kind, worker_id, message)
select 'worker_stopped', g.id, 'It shut down in order.' from gone g
returning id;

-- name: held_by
-- What was claimed at once has tokens of one session, which ascend.
select h.job_id, h.token, h.worker_id, h.state, h.task, h.queue, h.policy, h.failures, h.crashes, h.cancel_requested,
       h.timeout_s, h.heartbeat_timeout_s, h.held_s, h.running_s, h.silent_s, h.suspected_crashes, h.deferred
from {schema}.held_jobs h
join {schema}.jobs j on j.id = h.job_id
where h.worker_id = %(worker_id)s
order by j.claimed_at, h.token
limit %(limit)s;

-- name: blocked_outcomes
select b.job_id, b.session_pid from {schema}.blocked_outcomes_v1(%(ids)s) b;

-- name: lock_holders
-- Sessions that have locked something of the ledger in a transaction that is open for longer than ours ever are.
select a.pid, coalesce(nullif(a.application_name, ''), 'no application name'), a.state,
       extract(epoch from clock_timestamp() - a.xact_start)::double precision
from pg_stat_activity a
where a.pid <> pg_backend_pid() and a.datname = current_database()
  and (a.pid = any (%(pids)s) or a.xact_start < clock_timestamp() - make_interval(secs => %(open_s)s)
       and cardinality(%(pids)s) = 0
       and exists (
           select 1 from pg_locks l join pg_class c on c.oid = l.relation
           where l.pid = a.pid and l.granted and l.mode <> 'AccessShareLock'
             and l.database = (select d.oid from pg_database d where d.datname = current_database())
             and c.relnamespace = '{schema}'::regnamespace))
order by a.xact_start
limit 3;

-- Workers that come through another door than Python's own.

-- name: foreign_worker
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
       w.running_stale_after_s, w.recovery,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id and j.state = 'running')
from {schema}.workers w
join {schema}.worker_watch v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.id = %(worker_id)s and w.transport <> 'python';

-- name: fates
-- The row of a job tells of its last attempt, the others are kept apart. Joined by keys alone.
select u.job_id, u.token, j.state, j.token, j.worker_id, w.name, coalesce(j.attempt, 0),
       extract(epoch from j.started_at)::double precision, extract(epoch from j.finished_at)::double precision, j.error_code,
       coalesce(a.worker_id, case when j.token = u.token then j.worker_id end),
       coalesce(a.state, case when j.token = u.token and j.finished_at is not null then coalesce(j.last_attempt_state, j.state) end),
       coalesce(a.code, case when j.token = u.token and j.finished_at is not null then j.error_code end)
from unnest(%(job_ids)s::bigint[], %(tokens)s::bigint[]) with ordinality as u(job_id, token, place)
left join {schema}.jobs j on j.id = u.job_id
left join {schema}.attempts a on a.job_id = u.job_id and a.token = u.token
left join {schema}.workers w on w.id = j.worker_id and w.transport <> 'python'
order by u.place;

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
       w.running_stale_after_s, w.recovery,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id and j.state = 'running')
from {schema}.workers w
join {schema}.worker_watch v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.name = %(name)s and w.transport <> 'python'
order by w.state in ('active', 'draining', 'suspect') desc, w.created_at desc
limit 1;

-- name: living_python_worker
select id from {schema}.workers
where name = %(name)s and transport = 'python' and state in ('active', 'draining', 'suspect')
limit 1;

-- name: blocked_workers
-- A turn locks the row of its worker for share. What cannot be locked so is skipped, and no one waits.
with free as materialized (
    select w.id from {schema}.workers w where w.id = any (%(ids)s) for share skip locked
)
select w.id from {schema}.workers w
where w.id = any (%(ids)s) and not exists (select 1 from free f where f.id = w.id);

-- name: beat_foreign_in_flight
-- The same as below for who sends it without the driver.
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_v1($1, $2, $3, $4)
order by n;

-- name: beat_foreign
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_v1(%(worker_ids)s, %(running)s, %(settled)s, %(metadata)s)
order by n;

-- Who is switched off, and by what health is judged.

-- name: standings
select w.id, w.name, w.host, w.state, w.queues, w.tasks,
       -- Only our own workers weigh themselves.
       case when w.transport = 'python' then w.metadata -> 'health' end, w.disabled, h.disabled,
       w.request is not null or w.draining, v.silent_s < w.suspect_after_s,
       w.recovery
from {schema}.workers w
join {schema}.worker_watch v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.state in ('active', 'draining', 'suspect')
order by w.id;

-- name: disable
select {schema}.disable_v1(%(worker_id)s, %(reason)s, %(by)s, %(auto)s);

-- name: enable
-- The health that it reported goes with it: else it would be switched off again at once.
with enabled as (
    update {schema}.workers set disabled = null, metadata = metadata - 'health'
    where id = %(worker_id)s and disabled is not null
    returning id
)
insert into {schema}.events (kind, worker_id, message)
select 'worker_enabled', e.id, %(message)s from enabled e
returning id;

-- name: disable_host
with disabled as (
    insert into {schema}.hosts (name, disabled)
    values (%(host)s, jsonb_build_object('reason', %(reason)s::text, 'by', %(by)s::text, 'auto', false,
                                         'at', extract(epoch from clock_timestamp())::double precision))
    on conflict (name) do nothing
    returning name
)
insert into {schema}.events (kind, message)
select 'host_disabled', %(message)s from disabled
returning id;

-- name: enable_host
with enabled as (
    delete from {schema}.hosts where name = %(host)s returning name
), forgiven as (
    update {schema}.workers w set metadata = w.metadata - 'health'
    from enabled e
    where w.host = e.name and w.state in ('active', 'draining', 'suspect')
)
insert into {schema}.events (kind, message)
select 'host_enabled', %(message)s from enabled e
returning id;

-- Where the answers to jobs go, and what a broker's exchange needs beside turns.

-- name: post
-- Ids were drawn before, as for `enqueue`: repeated as it was, it stores nothing twice.
select place, job_id from {schema}.post_v1(
    %(ids)s, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s, %(policies)s, %(on_crash)s, %(heartbeats)s,
    %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s, %(unique_keys)s, %(enqueued_by)s,
    %(more)s, %(clients)s, %(services)s, %(request_ids)s, %(letter_places)s, %(letters)s, %(correlations)s, %(own_ids)s,
    %(notifies)s);

-- name: store_letter
-- After an `enqueue_once` in the same transaction, for the job that its key stands for. The share lock keeps the job from
-- being removed meanwhile; one that was removed since its key was remembered has no letter.
insert into {schema}.reply_addresses as l (job_id, client, service, request_id, place, places, correlation, own_id, notify)
select j.id, %(client)s, %(service)s, %(request_id)s, %(place)s, %(places)s, %(correlation)s, %(own_id)s, %(notify)s
from {schema}.requests r
join {schema}.jobs j on j.id = r.job_ids[1]
where r.key = %(key)s and r.fingerprint = %(fingerprint)s
for key share of j
on conflict (job_id) do update set
    client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
    places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
    answered_at = null
returning l.job_id;

-- name: answer_letters
update {schema}.reply_addresses set answered_at = clock_timestamp()
where job_id = any (%(ids)s) and answered_at is null
returning job_id;

-- name: begin_exchange
select {schema}.begin_exchange_v1(%(worker_ids)s, %(ids)s);

-- name: end_exchange
select {schema}.end_exchange_v1();

-- name: beat_foreign_along
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_along_v1(%(worker_ids)s, %(running)s, %(settled)s, %(metadata)s)
order by n;

-- name: letters
select client, service, request_id, place, places, correlation, own_id, notify, job_id,
       extract(epoch from answered_at)::double precision
from {schema}.reply_addresses
where client = %(client)s and answered_at is null and job_id > %(after)s
order by job_id
limit %(limit)s;

-- name: letter
select client, service, request_id, place, places, correlation, own_id, notify, job_id,
       extract(epoch from answered_at)::double precision
from {schema}.reply_addresses
where job_id = %(job_id)s;
