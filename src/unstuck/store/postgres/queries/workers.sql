-- What a worker says of itself, and its turn of the wheel.

-- name: register
-- Repeated after a lost answer it changes nothing, and never raises the dead. Nor does it for a second living foreign
-- worker of the same name.
with born as (
    insert into {schema}.workers (
        id, name, host, pid, boot_id, pid_namespace, process_started, trace, queues, tasks, concurrency, version,
        heartbeat_interval_s, suspect_after_s, running_stale_after_s, door, owner, recovery, metadata,
        created_at)
    values (
        %(id)s, %(name)s, %(host)s, %(pid)s, %(boot_id)s, %(pid_namespace)s, %(process_started)s, %(trace)s, %(queues)s,
        %(tasks)s, %(concurrency)s, %(version)s, %(heartbeat_interval_s)s, %(suspect_after_s)s,
        %(running_stale_after_s)s, %(door)s, %(owner)s, %(recovery)s, %(metadata)s::jsonb, clock_timestamp())
    on conflict do nothing
    returning id, name, pid, host, door
), first_beat as (
    insert into {schema}.beats (worker_id, beat_at, session_pid, session_start, session_server)
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
           case b.door when 'python' then format('Worker started: %%s (pid %%s on %%s)', b.name, b.pid, b.host)
                       else format('Worker started: %%s (over %%s, on %%s)', b.name, b.door, b.host) end
    from born b
)
select exists (select 1 from {schema}.hosts h where h.name = %(host)s and h.disabled is not null);

-- name: skip_lost_numbers
-- Before anything else on a connection: numbers that a lost primary gave out must not be given out again.
select {schema}.skip_lost_numbers_v1();

-- name: stamp_session
-- After a reconnect, so that the lost session is not taken for a lost worker. It is no beat.
update {schema}.beats set session_pid = %(session_pid)s, session_start = %(session_start)s, session_server = %(session_server)s
where worker_id = %(worker_id)s
returning worker_id;

-- name: beat
select state, was_suspect, request, cancel_ids, cancel_tokens, {schema}.is_disabled_v1(%(worker_id)s)
from {schema}.beat_v1(%(worker_id)s, %(running)s, %(processed)s, %(metadata)s, %(session_pid)s, %(session_start)s, %(session_server)s);

-- name: turn
select job_id, token, task, queue, running, payload, payload_type, policy, failures, crashes, attempt, suspicions, alone,
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
select job_id, token, worker_id, state, task, queue, policy, failures, crashes, cancel_requested, timeout_s,
       heartbeat_timeout_s, held_s, running_s, silent_s, suspicions, deferred
from {schema}.held_jobs
where worker_id = %(worker_id)s
order by job_id
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
