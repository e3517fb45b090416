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
    join {schema}.vitals v on v.worker_id = w.id
    left join {schema}.hosts h on h.name = w.host
    where w.state = 'active' and w.request is null and w.disabled is null and h.disabled is null
      and v.silent_s < w.suspect_after_s and p.queue = any (w.queues) and p.task = any (w.tasks));
