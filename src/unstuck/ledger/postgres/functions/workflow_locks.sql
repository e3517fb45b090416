-- Lock workflows before their jobs.

-- Lock the workflows of these jobs, in their order: two who end nodes of one workflow come one after the other.
--
-- The order of locks is: workers, workflows, jobs, lines. A session that ends a job, cancels it, gives it back or queues it
-- again calls this before it touches the job; for one that moves a workflow on goes from its row to jobs of it. One that
-- only claims or starts jobs, or makes them ready, waits for no workflow afterwards and needs no lock on it.
create or replace function {schema}.lock_workflows(p_ids bigint[]) returns void
language plpgsql volatile
{index_scans}
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
set cpu_tuple_cost = 10
as $body$
declare
    v_workflows bigint[];
begin
    select array_agg(distinct j.workflow_id) into v_workflows
    from unnest(p_ids) as u(id) join {schema}.jobs j on j.id = u.id
    where coalesce(j.workflow_id is not null, false);
    if v_workflows is not null then
        perform 1 from {schema}.workflows w where w.id = any (v_workflows) order by w.id for update;
    end if;
end
$body$;

-- Lock those of these workflows that no other session has locked, and give them.
create or replace function {schema}.free_workflows(p_workflows bigint[]) returns bigint[]
language plpgsql volatile
{index_scans}
as $body$
begin
    return array(select w.id from {schema}.workflows w where w.id = any (p_workflows) for update skip locked);
end
$body$;
