-- Workers that come through another door than Python's own.

-- name: foreign_worker
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
where w.id = %(worker_id)s and w.door <> 'python';

-- name: fates
-- The row of a job tells of its last attempt, the others are kept apart. Joined by keys alone.
select u.job_id, u.token, j.state, j.token, j.worker_id, w.name, coalesce(j.attempt, 0),
       extract(epoch from j.started_at)::double precision, extract(epoch from j.finished_at)::double precision, j.error_code,
       coalesce(a.worker_id, case when j.token = u.token then j.worker_id end),
       coalesce(a.state, case when j.token = u.token and j.finished_at is not null then coalesce(j.ended_as, j.state) end),
       coalesce(a.code, case when j.token = u.token and j.finished_at is not null then j.error_code end)
from unnest(%(job_ids)s::bigint[], %(tokens)s::bigint[]) with ordinality as u(job_id, token, place)
left join {schema}.jobs j on j.id = u.job_id
left join {schema}.attempts a on a.job_id = u.job_id and a.token = u.token
left join {schema}.workers w on w.id = j.worker_id and w.door <> 'python'
order by u.place;

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
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
where w.name = %(name)s and w.door <> 'python'
order by w.state in ('active', 'draining', 'suspect') desc, w.created_at desc
limit 1;

-- name: living_python_worker
select id from {schema}.workers
where name = %(name)s and door = 'python' and state in ('active', 'draining', 'suspect')
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
