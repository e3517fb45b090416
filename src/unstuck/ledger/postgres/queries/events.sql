-- What alerts are made of, and who was told.

-- name: add_alert_target
-- A new one hears of what happens from now on, not of history.
insert into {schema}.alert_targets (target, position) values (%(target)s, %(position)s)
on conflict (target) do nothing
returning target;

-- name: alert_target
-- In one snapshot with the newest event: all that the book says was told is visible in it.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select t.position, t.version, t.state, extract(epoch from clock_timestamp())::double precision,
       e.id, e.transaction_id::text::bigint, extract(epoch from e.at)::double precision,
       l.running
from look l
cross join {schema}.alert_targets t
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
) e on true
where t.target = %(target)s;

-- name: save_alert_target
-- Only on what was read: of two who decide at once one finds the version gone.
update {schema}.alert_targets set position = %(position)s, state = %(state)s, version = version + 1
where target = %(target)s and version = %(version)s
returning version;

-- name: events_to_tell
-- What clients are told when they enqueue is `no_workers` too; the condition is the one that names its queue.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select case when o.transaction_id < pg_snapshot_xmax(l.snapshot) then o.transaction_id::text::bigint else 0 end,
       extract(epoch from o.at)::double precision,
       e.id, extract(epoch from e.at)::double precision, e.kind, e.message, e.about, e.job_id, j.task, j.queue,
       e.worker_id, w.name, w.host, w.verdict, e.transaction_id::text::bigint
from look l
left join {schema}.events o on o.id = %(origin)s
left join lateral (
    select * from (
        (select * from {schema}.events
         where (job_id is null or kind in ('quarantined', 'workflow_paused'))
           and transaction_id = any (%(open)s::text[]::xid8[])
           and not exists (select 1 from unnest(%(begun)s::text[]::xid8[], %(begun_up_to)s::bigint[]) as b(xid, up_to)
                           where b.xid = transaction_id and id <= b.up_to)
           and kind = any (%(kinds)s) and id <> all (%(but)s)
           and (kind <> 'no_workers' or about is not null)
         order by transaction_id, id
         limit %(limit)s)
        union all
        (select * from {schema}.events
         where (job_id is null or kind in ('quarantined', 'workflow_paused'))
           and (transaction_id, id) > (%(transaction)s::text::xid8, %(id)s)
           and transaction_id < pg_snapshot_xmax(l.snapshot)
           and kind = any (%(kinds)s) and id <> all (%(but)s)
           and (kind <> 'no_workers' or about is not null)
         order by transaction_id, id
         limit %(limit)s)
    ) found
    order by transaction_id, id
    limit %(limit)s
) e on true
left join {schema}.jobs j on j.id = e.job_id
left join {schema}.workers w on w.id = e.worker_id
order by e.transaction_id, e.id;

-- name: conditions
select kind, about, message, extract(epoch from seen_at)::double precision,
       extract(epoch from begun_at)::double precision, extract(epoch from reminded_at)::double precision
from {schema}.conditions order by kind, about;

-- name: change_conditions
select {schema}.change_conditions_v1(%(changes)s::jsonb, %(remind_s)s);

-- name: look_fleet
-- In one row: ten thousand workers need not travel to be counted.
with living as materialized (
    select w.queues, w.created_at, w.metadata #> '{settings,check_interval_s}' as check_s,
           w.disabled is null and h.disabled is null as able
    from {schema}.workers w left join {schema}.hosts h on h.name = w.host
    where w.state in ('active', 'draining', 'suspect')
)
select (select count(*) from living), (select count(*) from living where able),
       (select coalesce(array_agg(distinct q.name), '{}') from living cross join lateral unnest(queues) as q(name) where able),
       (select extract(epoch from clock_timestamp() - min(created_at))::double precision from living),
       (select max(case when jsonb_typeof(check_s) = 'number' then check_s::double precision end) from living);

-- name: look_late
select w.id, w.name, w.host, w.state, v.silent_s
from {schema}.workers w
join {schema}.worker_watch v on v.worker_id = w.id
where w.state in ('active', 'draining', 'suspect') and v.silent_s >= coalesce(%(late_s)s, w.suspect_after_s)
order by w.id
limit %(limit)s;

-- name: look_held
select exists (select 1 from {schema}.jobs where held);

-- What those who listen need.

-- name: note_event
insert into {schema}.events (kind, job_id, worker_id, about, message)
values (%(kind)s, %(job_id)s, %(worker_id)s, %(about)s, %(message)s)
returning id;

-- name: glance
select id, state, attempt, token, worker_id from {schema}.jobs where id = any (%(ids)s);

-- name: unserved
-- Pairs of queue and task that no worker would take now, whatever the reason is.
select p.queue, p.task
from unnest(%(queues)s::text[], %(tasks)s::text[]) as p(queue, task)
where not exists (
    select 1
    from {schema}.workers w
    join {schema}.worker_watch v on v.worker_id = w.id
    left join {schema}.hosts h on h.name = w.host
    where w.state = 'active' and w.request is null and w.disabled is null and h.disabled is null
      and v.silent_s < w.suspect_after_s and p.queue = any (w.queues) and p.task = any (w.tasks));
