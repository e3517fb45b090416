-- What the watchman asks and does.

-- name: take_ticket
-- The row is its own lock and runs out by itself. A time far ahead comes from a clock that was set back: taken too.
insert into {schema}.tickets as t (name, until)
values (%(name)s, clock_timestamp() + make_interval(secs => %(ttl_s)s))
on conflict (name) do update set until = excluded.until
where t.until <= clock_timestamp() or t.until > clock_timestamp() + make_interval(secs => 2 * %(ttl_s)s)
returning 1;

-- name: watch
-- With `after`: the living of one host that follow this worker in the order of ids, going round; without: everybody
-- who lives, or is dead and still holds jobs. A session is present or missing only where the server lets us see it,
-- and not where the server was restarted since it was written down.
with seen as materialized (
    select a.pid, a.backend_start from pg_stat_get_activity(null) a where %(after)s::text is null
)
select w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.trace, w.state, v.silent_s,
       w.suspect_after_s, h.waits_for_s, h.held,
       case when v.session_pid is null or %(after)s::text is not null then 'unknown'
            when pg_postmaster_start_time() > v.session_start then 'unknown'
            when s.pid is null then 'missing'
            when s.backend_start is null then 'unknown'
            when s.backend_start = v.session_start then 'present'
            else 'missing' end,
       coalesce(extract(epoch from clock_timestamp() - w.suspect_at), 0)::double precision
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join seen s on s.pid = v.session_pid
cross join lateral (
    select count(*) as held,
           max(case when j.state = 'running' then
               case when coalesce(j.heartbeat, true) then coalesce(j.heartbeat_timeout_s, w.running_stale_after_s)
                    else 'infinity'::double precision end end) as waits_for_s
    from {schema}.jobs j
    where j.held and j.worker_id = w.id
) h
where (%(host)s::text is null or w.host = %(host)s)
  and (w.state in ('active', 'draining', 'suspect') or (h.held > 0 and %(after)s::text is null))
  and (%(after)s::text is null or w.id <> %(after)s)
order by coalesce(w.id < %(after)s, false), w.id
limit %(size)s;

-- name: condemn
select {schema}.condemn(%(worker_id)s, %(verdict)s::jsonb, %(guard)s, %(silent_s)s, %(message)s);

-- name: settle
select job_id, token from {schema}.settle(%(worker_id)s, %(endings)s, %(releases)s, %(guard)s, %(silent_s)s);

-- name: overdue
select job_id, token, worker_id, state, task, queue, policy, failures, crashes, cancel_requested, timeout_s,
       heartbeat_timeout_s, held_s, running_s, silent_s
from {schema}.held_jobs
where state = 'running' and timeout_s is not null
  and running_s > timeout_s + case when worker_state in ('active', 'draining') then %(grace_s)s else %(lost_grace_s)s end
order by job_id
limit %(limit)s;

-- name: stale
select job_id, token, worker_id, state, task, queue, policy, failures, crashes, cancel_requested, timeout_s,
       heartbeat_timeout_s, held_s, running_s, silent_s
from {schema}.held_jobs
where worker_state in ('dead', 'stopped') or silent_s >= %(older_than_s)s
order by job_id;

-- name: promote_due
-- Rows that somebody else has in hand just now are for the next round.
with due as materialized (
    select id from {schema}.jobs where waiting and run_at <= clock_timestamp()
    order by run_at limit %(limit)s for update skip locked
), promoted as (
    update {schema}.jobs j set ready = true, waiting = false from due where j.id = due.id returning j.queue
)
select queue, count(*) from promoted group by queue;

-- name: next_due
select greatest(0, extract(epoch from run_at - clock_timestamp()))::double precision
from {schema}.jobs where waiting order by run_at limit 1;

-- name: sweep_position
select swept_up_to from {schema}.ledger;

-- name: set_sweep_position
update {schema}.ledger set swept_up_to = %(position)s returning swept_up_to;

-- name: prune_batch
select next_after, removed from {schema}.prune_batch(%(after)s, %(older_than_s)s, %(states)s, %(look)s);

-- name: sweep_events
-- Ids go with time: looking at the first few is enough.
with first as (
    select id, at from {schema}.events order by id limit %(limit)s
), gone as (
    delete from {schema}.events e using first f
    where e.id = f.id and f.at < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    returning 1
)
select count(*) from gone;

-- name: sweep_workers
-- The tombstone stays until everything that the worker held is settled.
with gone as (
    delete from {schema}.workers w
    where w.id in (
        select d.id from {schema}.workers d
        where d.state in ('dead', 'stopped') and d.stopped_at < clock_timestamp() - make_interval(secs => %(older_than_s)s)
          and not exists (select 1 from {schema}.jobs j where j.held and j.worker_id = d.id)
        limit %(limit)s
        for update skip locked)
    returning w.id
), unheard as (
    delete from {schema}.beats b using gone g where b.worker_id = g.id
)
select count(*) from gone;

-- name: void_tokens
select {schema}.void_tokens();
