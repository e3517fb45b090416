-- What operators do.

-- name: set_paused
with changed as (
    insert into {schema}.queues as q (name, paused, paused_by, paused_at)
    select u.name, %(paused)s, %(by)s, clock_timestamp() from unnest(%(names)s::text[]) as u(name) order by u.name
    on conflict (name) do update
    set paused = excluded.paused, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where q.paused <> excluded.paused
    returning q.name
), told as (
    insert into {schema}.events (kind, message)
    select 'queue_' || %(word)s::text, format('Queue %%L was %%s by %%s', c.name, %(word)s::text, %(by)s::text) from changed c
)
select name from changed order by name;

-- name: paused_queues
select name from {schema}.queues where paused order by name;

-- name: request
with asked as (
    update {schema}.workers set request = %(what)s
    where id = %(worker_id)s and state in ('active', 'draining', 'suspect')
    returning id
)
insert into {schema}.events (kind, worker_id, message)
select 'worker_asked_to_' || %(what)s::text, a.id, format('Asked to %%s by %%s', %(what)s::text, %(by)s::text) from asked a
returning id;

-- name: nodes_to_stop
-- What still runs of these, if they are workflows, and was not asked to stop.
select n.job_id
from {schema}.workflows w
join {schema}.nodes n on n.workflow_id = w.id
join {schema}.jobs j on j.id = n.job_id
where w.id = any (%(ids)s) and w.state = 'cancelled' and n.state = 'released' and n.kind = 'task' and j.held
  and j.cancel_requested is not true;

-- name: cancel
select job_id, answer, worker_id from {schema}.cancel_v1(%(ids)s, %(by)s);

-- name: stop_node
-- Of a workflow that is still cancelled: meanwhile it may have been taken up again.
with locked as materialized (
    select j.id
    from {schema}.jobs j
    join {schema}.workflows w on w.id = j.workflow_id
    where j.id = %(id)s and w.state = 'cancelled'
    for update of w
)
select c.job_id, c.answer from locked l cross join lateral {schema}.cancel_v1(array[l.id], %(by)s) c;

-- name: retry
select {schema}.retry_v1(%(job_id)s, %(by)s);

-- name: purge
select {schema}.purge_v1(%(ids)s, %(cause)s);

-- name: to_purge
select {schema}.to_purge_v1(%(queue)s, %(after)s, %(limit)s);

-- name: tell
insert into {schema}.events (kind, message) values (%(kind)s, %(message)s) returning id;
