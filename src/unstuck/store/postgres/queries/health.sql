-- Who is switched off, and by what health is judged.

-- name: hosts
select name, disabled from {schema}.hosts order by name;

-- name: standings
select w.id, w.name, w.host, w.state, w.queues, w.tasks,
       -- Only our own workers weigh themselves.
       case when w.door = 'python' then w.metadata -> 'health' end, w.disabled, h.disabled,
       w.request is not null or w.draining, v.silent_s < w.suspect_after_s,
       extract(epoch from clock_timestamp() - w.stopped_at)::double precision, w.verdict ->> 'detector',
       w.door, w.recovery
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.state in ('active', 'draining', 'suspect')
   or w.stopped_at > greatest(clock_timestamp() - make_interval(secs => %(dead_for_s)s), h.enabled_at)
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
select {schema}.disable_host_v1(%(host)s, %(reason)s, %(by)s, %(auto)s);

-- name: enable_host
with enabled as (
    update {schema}.hosts set disabled = null, enabled_at = clock_timestamp()
    where name = %(host)s and disabled is not null
    returning name
), forgiven as (
    update {schema}.workers w set metadata = w.metadata - 'health'
    from enabled e
    where w.host = e.name and w.state in ('active', 'draining', 'suspect')
)
insert into {schema}.events (kind, message)
select 'host_enabled', %(message)s from enabled e
returning id;
