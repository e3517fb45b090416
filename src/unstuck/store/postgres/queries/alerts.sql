-- What alerts are made of, and who was told.

-- name: add_alert_target
-- A new one hears of what happens from now on, not of history.
insert into {schema}.alert_targets (target, event_id)
select %(target)s, coalesce((select max(id) from {schema}.events), 0)
on conflict (target) do nothing
returning target;

-- name: alert_target
select t.event_id, t.version, t.state, extract(epoch from clock_timestamp())::double precision,
       coalesce((select max(id) from {schema}.events), 0)
from {schema}.alert_targets t
where t.target = %(target)s;

-- name: save_alert_target
-- Only on what was read: of two who decide at once one finds the version gone.
update {schema}.alert_targets set event_id = %(event_id)s, state = %(state)s, version = version + 1
where target = %(target)s and version = %(version)s
returning version;

-- name: events_to_tell
-- What clients are told when they enqueue is `no_workers` too; the condition is the one that names its queue.
select e.id, extract(epoch from e.at)::double precision, e.kind, e.message, e.about, e.job_id, j.task, j.queue,
       e.worker_id, w.name, w.host, w.verdict
from {schema}.events e
left join {schema}.jobs j on j.id = e.job_id
left join {schema}.workers w on w.id = e.worker_id
where (e.job_id is null or e.kind in ('quarantined', 'workflow_paused'))
  and e.id > %(after_id)s and e.kind = any (%(kinds)s) and e.id <> all (%(but)s)
  and (e.kind <> 'no_workers' or e.about is not null)
order by e.id
limit %(limit)s;

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
join {schema}.vitals v on v.worker_id = w.id
where w.state in ('active', 'draining', 'suspect') and v.silent_s >= coalesce(%(late_s)s, w.suspect_after_s)
order by w.id
limit %(limit)s;

-- name: look_held
select exists (select 1 from {schema}.jobs where held);
