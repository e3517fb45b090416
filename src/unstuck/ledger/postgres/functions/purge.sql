-- Remove what waits in a queue.

-- The next pending jobs of a queue that have not begun, in the order of their ids. Locks nothing: `purge_v1` looks again.
create or replace function {schema}.to_purge_v1(p_queue text, p_after bigint, p_limit integer) returns bigint[]
language sql volatile
{index_scans}
as $body$
    select array_agg(x.id order by x.id) from (
        select i.id from (
            select j.id, j.attempt, j.state from {schema}.jobs j where j.ready and j.queue = p_queue
            union all
            select j.id, j.attempt, j.state from {schema}.jobs j where j.scheduled and j.queue = p_queue
            union all
            select j.id, j.attempt, j.state from {schema}.jobs j where j.blocked and j.queue = p_queue
        ) i
        where i.id > p_after and i.attempt = 0 and i.state = 'pending'
        order by i.id limit p_limit) x
$body$;

-- Those of these workflows of which a node has begun: it was tried, or is in the hands of a worker.
create or replace function {schema}.begun_workflows(p_workflows bigint[]) returns bigint[]
language plpgsql volatile
{index_scans}
as $body$
begin
    return array(
        select w.id from unnest(p_workflows) as w(id)
        where exists (
            select 1 from {schema}.workflow_nodes n left join {schema}.jobs j on j.id = n.job_id
            where n.workflow_id = w.id and n.kind = 'task'
              and (n.state in ('succeeded', 'failed', 'paused') or j.attempt > 0 or j.held)));
end
$body$;

-- Cancel those of these jobs that still wait and have not begun, and give how many. A pending node of a workflow that has
-- begun is spared: without it the work that is done would be lost. Found in a transaction of its own (`to_purge`): here
-- workflows are locked before jobs. What a worker is claiming at this moment is its own.
create or replace function {schema}.purge_v1(p_ids bigint[], p_cause text) returns integer
language plpgsql volatile
{index_scans}
set lock_timeout = '500ms'
as $body$
declare
    v_ids bigint[];
    v_begun bigint[];
    v_linked bigint[];
begin
    perform {schema}.lock_workflows(p_ids);
    v_begun := {schema}.begun_workflows(array(
        select distinct j.workflow_id from {schema}.jobs j where j.id = any (p_ids) and j.workflow_id is not null));
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j
        where j.id = any (p_ids) and (j.ready or j.scheduled or j.blocked) and j.state = 'pending' and j.attempt = 0
          and coalesce(j.workflow_id <> all (v_begun), true)
        for update skip locked) x;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, scheduled = false, blocked = null, awaits_signal = null,
            finished_at = clock_timestamp(), active_key = null, error_code = 'CANCELLED',
            error_message = 'Job was cancelled', error_cause = p_cause, error_details = null
        where j.id = any (v_ids)
        returning j.id, j.has_links
    ) select array_agg(s.id order by s.id) filter (where s.has_links) into v_linked from stopped s;
    if v_linked is not null then
        perform {schema}.settled(v_linked, array_fill('cancelled'::text, array[cardinality(v_linked)]));
    end if;
    return coalesce(cardinality(v_ids), 0);
end
$body$;
