-- Schedules: their definitions, and one enqueue per tick.

-- name: know_schedule
-- A definition that is known is left alone, so that its version stays. Where its times are the same it goes on where it
-- is; else it begins anew.
insert into {schema}.schedules as s (name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job)
values (%(name)s, %(source)s, %(fingerprint)s, %(task)s, %(queue)s, %(cron)s, %(every_s)s, %(zone)s, %(catch_up)s, %(job)s)
on conflict (name) do update set
    source = excluded.source, fingerprint = excluded.fingerprint, task = excluded.task, queue = excluded.queue,
    cron = excluded.cron, every_s = excluded.every_s, zone = excluded.zone, catch_up = excluded.catch_up,
    job = excluded.job, version = s.version + 1, changed_at = excluded.changed_at,
    next_at = case when (s.cron, s.every_s, s.zone) is not distinct from (excluded.cron, excluded.every_s, excluded.zone)
                   then s.next_at end
where (s.source, s.fingerprint) <> (excluded.source, excluded.fingerprint)
returning s.name;

-- name: differing_schedules
select s.name, s.source, s.fingerprint, s.task, s.queue, s.cron, s.every_s, s.zone, s.catch_up, s.job, s.paused,
       s.paused_by, extract(epoch from s.next_at)::double precision, extract(epoch from s.last_at)::double precision,
       extract(epoch from s.fired_at)::double precision, s.last_job_id, s.version,
       extract(epoch from s.changed_at)::double precision,
       exists (
           select 1 from {schema}.workers w
           where w.state in ('active', 'draining', 'suspect') and w.transport = 'python'
             and w.metadata -> 'schedules' @> to_jsonb(array[s.fingerprint]))
from unnest(%(names)s::text[], %(fingerprints)s::text[]) as k(name, fingerprint)
join {schema}.schedules s on s.name = k.name
where s.source = 'app' and s.fingerprint <> k.fingerprint
order by s.name;

-- name: restore_schedule
with restored as (
    update {schema}.schedules s set
        fingerprint = %(fingerprint)s, task = %(task)s, queue = %(queue)s, cron = %(cron)s, every_s = %(every_s)s,
        zone = %(zone)s, catch_up = %(catch_up)s, job = %(job)s, version = s.version + 1, changed_at = clock_timestamp(),
        next_at = case when (s.cron, s.every_s, s.zone)
                            is not distinct from (%(cron)s::text, %(every_s)s::double precision, %(zone)s::text)
                       then s.next_at end
    where s.name = %(name)s and s.source = 'app' and s.fingerprint = %(replaces)s
    returning s.name
)
insert into {schema}.events (kind, about, message)
select 'schedule_restored', 'schedule:' || r.name, %(message)s from restored r
returning id;

-- name: schedules
select name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, paused, paused_by,
       extract(epoch from next_at)::double precision, extract(epoch from last_at)::double precision,
       extract(epoch from fired_at)::double precision, last_job_id, version, extract(epoch from changed_at)::double precision
from {schema}.schedules
order by name;

-- name: due_schedules
-- The first row has the time by which the others were chosen, and when the next of the rest is due. Those of `after`
-- come last, in that order: locks keep them from firing, and they must not take the places of others.
with clock as materialized (
    select clock_timestamp() as now
), mine as materialized (
    select s.* from {schema}.schedules s
    where not s.paused and (s.source = 'operator' or s.fingerprint = any (%(fingerprints)s))
), due as (
    select m.* from mine m, clock c
    where m.next_at is null or m.next_at <= c.now
       or m.last_at > c.now + make_interval(secs => case
              when m.every_s is null then %(ahead_s)s
              else least(%(ahead_s)s, greatest(%(interval_ahead_s)s, %(intervals_ahead)s * m.every_s)) end)
    order by array_position(%(after)s::text[], m.name) nulls first, m.next_at nulls first, m.name
    limit %(limit)s
)
select null, null, null, null, null, null, null::double precision, null, null, null::bytea, null::boolean, null,
       extract(epoch from (select min(m.next_at) from mine m where m.next_at > c.now))::double precision,
       extract(epoch from c.now)::double precision, null::double precision, null::bigint, null::bigint,
       null::double precision
from clock c
union all
select d.name, d.source, d.fingerprint, d.task, d.queue, d.cron, d.every_s, d.zone, d.catch_up, d.job, d.paused,
       d.paused_by, extract(epoch from d.next_at)::double precision, extract(epoch from d.last_at)::double precision,
       extract(epoch from d.fired_at)::double precision, d.last_job_id, d.version,
       extract(epoch from d.changed_at)::double precision
from due d;

-- name: fire_schedule
-- The bound is set with the statement, so that it also holds behind a pooler.
with bound as materialized (
    select set_config('lock_timeout', %(wait_ms)s::text, true) as wait_ms
)
select {schema}.fire_schedule_v1(
    %(name)s, %(version)s, %(next_at)s, %(last_at)s, %(event)s, %(message)s, %(count)s, %(queues)s, %(tasks)s,
    %(payloads)s, %(payload_types)s, %(policies)s, %(on_crash)s, %(heartbeats)s, %(heartbeat_timeouts_s)s,
    %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s, %(unique_keys)s, %(enqueued_by)s, %(more)s)
from bound where bound.wait_ms is not null;

-- name: pause_schedule
-- Whoever resumes it begins anew from then: what came due meanwhile was not wanted.
with changed as (
    update {schema}.schedules s set
        paused = %(paused)s, paused_by = case when %(paused)s then %(by)s end, next_at = null, version = s.version + 1
    where s.name = %(name)s and s.paused <> %(paused)s
    returning s.name
)
insert into {schema}.events (kind, about, message)
select 'schedule_' || %(word)s::text, 'schedule:' || c.name,
       format('Schedule ''%%s'' was %%s by %%s', c.name, %(word)s::text, %(by)s::text)
from changed c
returning id;

-- name: remove_schedule
with gone as (
    delete from {schema}.schedules s where s.name = %(name)s returning s.name
)
insert into {schema}.events (kind, about, message)
select 'schedule_removed', 'schedule:' || g.name, format('Schedule ''%%s'' was removed by %%s', g.name, %(by)s::text) from gone g
returning id;
