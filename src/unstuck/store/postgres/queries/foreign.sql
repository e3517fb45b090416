-- Workers that come through another door than Python's own.

-- name: foreign_worker
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.id = %(worker_id)s and w.door <> 'python';

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.name = %(name)s and w.door <> 'python'
order by w.state in ('active', 'draining', 'suspect') desc, w.created_at desc
limit 1;

-- name: beat_foreign_in_flight
-- The same as below for who sends it without the driver.
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_v1($1, $2, $3, $4)
order by n;

-- name: beat_foreign
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_v1(%(worker_ids)s, %(running)s, %(settled)s, %(metadata)s)
order by n;
