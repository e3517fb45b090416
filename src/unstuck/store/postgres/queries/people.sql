-- What people ask. Nothing here changes anything.

-- name: job
select id, task, queue, state, -rank, payload, coalesce(payload_type, 'json'), result, error_code, error_message,
       error_cause, error_details, coalesce(policy, ''::bytea), failures, crash_count, attempt, unique_key,
       coalesce(cancel_requested, false), extract(epoch from enqueued_at)::double precision, enqueued_by,
       extract(epoch from coalesce(run_at, enqueued_at))::double precision,
       extract(epoch from claimed_at)::double precision, extract(epoch from started_at)::double precision,
       extract(epoch from finished_at)::double precision, worker_id, token, coalesce(suspicions, 0),
       coalesce(alone, false), awaits, awaits is null or waiting
from {schema}.jobs
where id = %(job_id)s;

-- name: jobs
-- Planned with its values, so that conditions that were not asked for are gone before the plan is made.
select id, task, queue, state, -rank, ''::bytea, coalesce(payload_type, 'json'), null::bytea, error_code, error_message,
       error_cause, error_details, coalesce(policy, ''::bytea), failures, crash_count, attempt, unique_key,
       coalesce(cancel_requested, false), extract(epoch from enqueued_at)::double precision, enqueued_by,
       extract(epoch from coalesce(run_at, enqueued_at))::double precision,
       extract(epoch from claimed_at)::double precision, extract(epoch from started_at)::double precision,
       extract(epoch from finished_at)::double precision, worker_id, token, coalesce(suspicions, 0),
       coalesce(alone, false), awaits, awaits is null or waiting
from {schema}.jobs
where (%(before_id)s::bigint is null or id < %(before_id)s)
  and (%(from_id)s::bigint is null or id >= %(from_id)s)
  and (%(states)s::text[] is null or state = any (%(states)s::text[]))
  -- What these states imply is said, so that the indexes of the few are found among the many.
  and (not %(held)s::boolean or held)
  and (not %(pending)s::boolean or ready or waiting or blocked)
  and (not %(wrong)s::boolean or error_code is not null)
  and (%(queue)s::text is null or queue = %(queue)s)
  and (%(task)s::text is null or task = %(task)s)
  and (%(error)s::text is null or error_code = %(error)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
  and (%(older_than_s)s::double precision is null
       or enqueued_at <= clock_timestamp() - make_interval(secs => %(older_than_s)s))
  and (%(newer_than_s)s::double precision is null
       or enqueued_at >= clock_timestamp() - make_interval(secs => %(newer_than_s)s))
order by id desc
limit %(limit)s;

-- name: count_jobs
select state, count(*) from {schema}.jobs group by state;

-- name: attempts
select s.token, s.worker_id, s.state, extract(epoch from s.claimed_at)::double precision,
       extract(epoch from s.started_at)::double precision, extract(epoch from s.ended_at)::double precision, s.code, s.cause,
       extract(epoch from s.last_heartbeat_at)::double precision,
       extract(epoch from s.heartbeat_deadline)::double precision, extract(epoch from s.deadline)::double precision, a.body::text
from {schema}.attempt_status s
left join {schema}.autopsies a on a.job_id = s.job_id and a.token = s.token
where s.job_id = %(job_id)s
order by s.claimed_at, s.token;

-- name: deferred_outcome
select d.worker_id, d.is_return, d.reason, extract(epoch from d.since)::double precision
from {schema}.jobs j
join {schema}.deferred_outcomes d on d.worker_id = j.worker_id and d.token = j.token
where j.id = %(job_id)s and j.held and (d.good_until is null or d.good_until > clock_timestamp());

-- name: progress
select job_id, token, at, done, total, message, busy_since from {schema}.progress where job_id = any (%(ids)s);

-- name: events_after
select id, extract(epoch from at)::double precision, kind, job_id, worker_id, message, transaction_id::text::bigint
from {schema}.events
where id > %(after_id)s
  and (%(job_id)s::bigint is null or job_id = %(job_id)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
order by id
limit %(limit)s;

-- name: last_events
select id, extract(epoch from at)::double precision, kind, job_id, worker_id, message, transaction_id::text::bigint
from {schema}.events
where (%(job_id)s::bigint is null or job_id = %(job_id)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
order by id desc
limit %(limit)s;

-- name: newest_event
-- One statement is one snapshot: it says what can be seen, and which transactions are open. Transactions of the future
-- are those of another server: a dump brought them. They count as transaction 0, which `sweep_moved_events` makes of them:
-- if there are no others, the newest event is the last of them.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select e.id, e.transaction_id::text::bigint, extract(epoch from e.at)::double precision,
       l.running
from look l
left join lateral (
    select n.id, n.transaction_id, n.at from (
        (select 1 as choice, id, transaction_id, at from {schema}.events
         where transaction_id > '0' and transaction_id < pg_snapshot_xmax(l.snapshot)
         order by transaction_id desc, id desc
         limit 1)
        union all
        (select 2, id, '0', at from {schema}.events order by id desc limit 1)
    ) n
    order by n.choice
    limit 1
) e on true;

-- name: events_since
-- First what open transactions brought since, then what is new.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select l.running,
       case when o.transaction_id < pg_snapshot_xmax(l.snapshot) then o.transaction_id::text::bigint else 0 end,
       extract(epoch from o.at)::double precision,
       (select min(id) from {schema}.events),
       e.id, extract(epoch from e.at)::double precision, e.kind, e.job_id, e.worker_id, e.message,
       e.transaction_id::text::bigint
from look l
left join {schema}.events o on o.id = %(origin)s
left join lateral (
    select * from (
        (select * from {schema}.events
         where transaction_id = any (%(open)s::text[]::xid8[])
           and not exists (select 1 from unnest(%(begun)s::text[]::xid8[], %(begun_up_to)s::bigint[]) as b(xid, up_to)
                           where b.xid = transaction_id and id <= b.up_to)
           and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
         order by transaction_id, id
         limit %(limit)s)
        union all
        (select * from {schema}.events
         where (transaction_id, id) > (%(transaction)s::text::xid8, %(id)s)
           and transaction_id < pg_snapshot_xmax(l.snapshot)
           and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
         order by transaction_id, id
         limit %(limit)s)
    ) found
    order by transaction_id, id
    limit %(limit)s
) e on true
order by e.transaction_id, e.id;

-- name: events_of_job_since
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select l.running,
       case when o.transaction_id < pg_snapshot_xmax(l.snapshot) then o.transaction_id::text::bigint else 0 end,
       extract(epoch from o.at)::double precision,
       (select min(id) from {schema}.events),
       e.id, extract(epoch from e.at)::double precision, e.kind, e.job_id, e.worker_id, e.message,
       e.transaction_id::text::bigint
from look l
left join {schema}.events o on o.id = %(origin)s
left join lateral (
    select * from (
        select id, at, kind, job_id, worker_id, message,
               case when transaction_id < pg_snapshot_xmax(l.snapshot) then transaction_id else '0' end as transaction_id
        from {schema}.events where job_id = %(job_id)s
    ) of_job
    where ((transaction_id, id) > (%(transaction)s::text::xid8, %(id)s)
           or transaction_id = any (%(open)s::text[]::xid8[]))
      and not exists (select 1 from unnest(%(begun)s::text[]::xid8[], %(begun_up_to)s::bigint[]) as b(xid, up_to)
                           where b.xid = transaction_id and id <= b.up_to)
    order by transaction_id, id
    limit %(limit)s
) e on true
order by e.transaction_id, e.id;

-- name: outputs
select token, stdout, stderr from {schema}.outputs where job_id = %(job_id)s order by token;

-- name: workers
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner,
       w.running_stale_after_s, w.recovery,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id and j.state = 'running')
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.state in ('active', 'draining', 'suspect') or not %(living_only)s
order by w.created_at, w.id;

-- name: queues
with ready as (
    select queue, count(*) as pending, min(coalesce(run_at, enqueued_at)) as since
    from {schema}.jobs where ready group by queue
), waiting as (
    select queue, count(*) filter (where state = 'pending') as scheduled, count(*) filter (where state = 'waiting') as asleep
    from {schema}.jobs where waiting group by queue
), awaiting as (
    select queue, count(*) as signals from {schema}.jobs where awaits is not null and not waiting group by queue
), blocked as (
    select queue, count(*) as blocked from {schema}.jobs where blocked group by queue
), held as (
    select queue, count(*) filter (where state = 'claimed') as claimed, count(*) filter (where state = 'running') as running
    from {schema}.jobs where held group by queue
), served as (
    select q.name as queue, count(*) as workers
    from {schema}.workers w cross join lateral unnest(w.queues) as q(name)
    where w.state in ('active', 'draining', 'suspect') group by q.name
), names as (
    select queue from ready union select queue from waiting union select queue from awaiting union select queue from blocked union select queue from held union select queue from served
    union select queue from {schema}.tasks union select name from {schema}.queues where paused
)
select n.queue, coalesce(p.paused, false), coalesce(r.pending, 0), coalesce(s.scheduled, 0), coalesce(h.claimed, 0),
       coalesce(h.running, 0), greatest(0, extract(epoch from clock_timestamp() - r.since))::double precision,
       coalesce(v.workers, 0), coalesce(s.asleep, 0) + coalesce(a.signals, 0), coalesce(b.blocked, 0), r.since is not null
from names n
left join {schema}.queues p on p.name = n.queue
left join ready r on r.queue = n.queue
left join waiting s on s.queue = n.queue
left join awaiting a on a.queue = n.queue
left join blocked b on b.queue = n.queue
left join held h on h.queue = n.queue
left join served v on v.queue = n.queue
order by n.queue;

-- name: tasks
select name, queue, coalesce(policy, ''::bytea), is_async from {schema}.tasks order by name;
