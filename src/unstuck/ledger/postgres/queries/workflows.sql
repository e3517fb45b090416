-- Workflows, as clients, operators and people know them.

-- name: begin_workflow
-- Under an id that was drawn before: repeated as it was, it stores nothing twice.
select {schema}.begin_workflow_v1(%(id)s, %(name)s, %(root)s, %(nodes)s, %(edges)s);

-- name: begin_workflow_later
-- Within a transaction that goes on.
select {schema}.begin_workflow_v1(%(id)s, %(name)s, %(root)s, %(nodes)s, %(edges)s, true);

-- name: begin_workflow_once
select first, fingerprint, job_ids, fresh, queues
from {schema}.begin_workflow_once_v1(
    %(key)s, %(fingerprint)s, %(keep_s)s, %(id)s, %(unique_key)s, %(name)s, %(root)s, %(nodes)s, %(edges)s);

-- name: owner_of_key
select id from {schema}.jobs where active_key = %(key)s;

-- name: workflow
select id, name, state, extract(epoch from created_at)::double precision, extract(epoch from finished_at)::double precision
from {schema}.workflows where id = %(id)s;

-- name: workflow_nodes
select n.place, n.parent, n.name, n.kind, n.state, n.on_error, n.job_id, j.state,
       d.task,
       extract(epoch from j.started_at)::double precision, extract(epoch from n.finished_at)::double precision, n.error,
       n.item, n.blockers,
       array(select e.source from {schema}.workflow_edges e where e.workflow_id = n.workflow_id and e.target = n.place order by 1)
from {schema}.workflow_nodes n
left join {schema}.jobs j on j.id = n.job_id
left join {schema}.node_jobs d
    on d.workflow_id = n.workflow_id and d.place = case when n.item is null then n.place else n.parent end
where n.workflow_id = %(id)s and n.place > 0
order by n.place;

-- name: workflows
select w.id, w.name, w.state, extract(epoch from w.created_at)::double precision,
       extract(epoch from w.finished_at)::double precision,
       (select jsonb_object_agg(c.state, c.n) from (
            select n.state, count(*) as n from {schema}.workflow_nodes n
            where n.workflow_id = w.id and n.kind = 'task' group by n.state) c)
from {schema}.workflows w
where w.id < %(before_id)s
order by w.id desc
limit %(limit)s;

-- name: workflows_in_state
select w.id, w.name, w.state, extract(epoch from w.created_at)::double precision,
       extract(epoch from w.finished_at)::double precision,
       (select jsonb_object_agg(c.state, c.n) from (
            select n.state, count(*) as n from {schema}.workflow_nodes n
            where n.workflow_id = w.id and n.kind = 'task' group by n.state) c)
from {schema}.workflows w
-- Ordered by the whole key of the index, so that it is walked from its end whatever the statistics say.
where w.state = %(state)s and w.id < %(before_id)s
order by w.state desc, w.id desc
limit %(limit)s;

-- name: job_place
select workflow_id, place from {schema}.jobs where id = %(id)s;

-- name: retry_workflow
with locked as materialized (select id from {schema}.workflows where id = %(id)s for update)
select {schema}.reopen_workflow_v1(id, %(by)s) from locked;

-- name: nodes_to_unstop
-- What was in somebody's hands when the workflows of these jobs were taken up again, and had been asked to stop.
select n.job_id
from {schema}.workflow_nodes n
where n.workflow_id in (select j.workflow_id from {schema}.jobs j where j.id = any (%(ids)s)) and n.unstop;

-- name: unstop
select {schema}.unstop_v1(%(id)s);

-- name: resume_workflow
select {schema}.resume_workflow_v1(%(id)s, %(by)s);

-- name: repair_workflows
with repaired as materialized (
    select workflow_id, what, queues, next_after from {schema}.repair_workflows_v1(%(after)s, %(look)s, %(limit)s)
), told as (
    insert into {schema}.events (kind, job_id, message)
    select 'workflow_repaired', r.workflow_id, 'Repaired: ' || r.what from repaired r where r.workflow_id is not null
)
select workflow_id, what, queues, next_after from repaired;

-- name: inputs
select job_id, place, is_list, item, result, error from {schema}.inputs_v1(%(ids)s, %(max_bytes)s);
