-- Results and errors of nodes.

-- The error that stands for a result which is not stored.
create or replace function {schema}.result_missing(p_name text, p_job_id bigint) returns jsonb
language sql immutable
{fixed_path}
as $body$
    select jsonb_build_object('node', p_name, 'job_id', p_job_id, 'code', 'RESULT_NOT_AVAILABLE',
                              'message', 'Its result is not there any more', 'cause', null)
$body$;

-- What a job that did not succeed is to those who depend on it. A row without an error was edited by hand or restored in
-- part: then the error is what its state means (`missing_error` in domain/endings.py). A success without a result has none.
create or replace function {schema}.node_error(p_name text, p_job {schema}.jobs) returns jsonb
language sql immutable
{fixed_path}
as $body$
    select case
        when (p_job).state = 'succeeded' then {schema}.result_missing(p_name, (p_job).id)
        when coalesce((p_job).error_code, '') <> '' then jsonb_build_object(
            'node', p_name, 'job_id', (p_job).id,
            'code', case (p_job).error_code when 'CANCELLED' then 'TASK_CANCELLED' else (p_job).error_code end,
            'message', coalesce((p_job).error_message, ''), 'cause', (p_job).error_cause)
        else jsonb_build_object(
            'node', p_name, 'job_id', (p_job).id,
            'code', case (p_job).state when 'failed' then 'WORKER_CRASHED' when 'cancelled' then 'TASK_CANCELLED'
                                       else 'CRASHED_TOO_OFTEN' end,
            'message', case (p_job).state when 'failed' then 'Worker died unexpectedly'
                                          when 'cancelled' then 'Job was cancelled' else 'Job is quarantined' end,
            'cause', 'its row stores no error: it was edited by hand, or restored in part')
        end
$body$;

-- The result of a node as JSON; errors stand for themselves, under a name that no result has by chance.
create or replace function {schema}.node_result(p_workflow bigint, p_place integer) returns text
language plpgsql stable
{fixed_path}
as $body$
declare
    v_node {schema}.workflow_nodes;
    v_result bytea;
begin
    select n.* into v_node from {schema}.workflow_nodes n where n.workflow_id = p_workflow and n.place = p_place;
    if v_node.state is distinct from 'succeeded' then
        return jsonb_build_object('$error', coalesce(v_node.error, jsonb_build_object(
            'node', v_node.name, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'It has not ended')))::text;
    end if;
    if v_node.kind = 'group' then
        return case when v_node.source is null then 'null' else {schema}.node_result(p_workflow, v_node.source) end;
    end if;
    if v_node.kind = 'map' then
        return '[' || coalesce((
            select string_agg({schema}.node_result(p_workflow, m.place), ',' order by m.item) from {schema}.workflow_nodes m
            where m.workflow_id = p_workflow and m.parent = p_place), '') || ']';
    end if;
    select j.result into v_result from {schema}.jobs j where j.id = v_node.job_id;
    if v_result is null then
        return jsonb_build_object('$error', {schema}.result_missing(v_node.name, v_node.job_id))::text;
    end if;
    return convert_from(v_result, 'UTF8');
exception when data_exception then
    return jsonb_build_object('$error', jsonb_build_object(
        'node', v_node.name, 'job_id', v_node.job_id, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'Its result is no JSON'))::text;
end
$body$;

-- Of jobs that are nodes: how those ended that they need. One row for each, in order; a map has one for each member, with
-- its number (`item`), or one row without a number where it has none.
create or replace function {schema}.inputs_v1(p_ids bigint[], p_max_bytes bigint)
returns table (
    job_id bigint, place integer, is_list boolean, item integer, result bytea, error jsonb)
language sql stable
{index_scans}
set join_collapse_limit = 1
as $body$
    with recursive wanted as (
        select j.id as job_id, j.workflow_id, e.source as place, e.source as at
        from {schema}.jobs j
        join {schema}.workflow_edges e on e.workflow_id = j.workflow_id and e.target = j.place and e.data
        where j.id = any (p_ids)
        union all
        -- A group's result is that of the node that stands for it.
        select w.job_id, w.workflow_id, w.place, n.source
        from wanted w
        join {schema}.workflow_nodes n on n.workflow_id = w.workflow_id and n.place = w.at
        where n.kind = 'group' and n.state = 'succeeded' and n.source is not null
    ), found as (
        select w.job_id, w.workflow_id, w.place, n.kind = 'map' and n.state = 'succeeded' as is_list, n.place as at, n.kind, n.state, n.name, n.job_id as node_job, n.error
        from wanted w
        join {schema}.workflow_nodes n on n.workflow_id = w.workflow_id and n.place = w.at
        where not (n.kind = 'group' and n.state = 'succeeded' and n.source is not null)
    ), parts as (
        select f.job_id, f.place, f.is_list, null::integer as item, f.kind, f.state, f.name, f.node_job, f.error from found f where not f.is_list
        union all
        select f.job_id, f.place, true, m.item, coalesce(m.kind, 'none'), m.state, m.name, m.job_id, m.error
        from found f
        left join {schema}.workflow_nodes m on m.workflow_id = f.workflow_id and m.parent = f.at
        where f.is_list
    ), given as (
        select p.job_id, p.place, p.is_list, p.item, case when p.state = 'succeeded' then d.result end as result,
               case when p.kind = 'task' and (p.state <> 'succeeded' or d.result is null)
                        then coalesce(p.error, {schema}.result_missing(p.name, p.node_job))
                    when p.kind in ('map', 'group') and p.state <> 'succeeded' then p.error end as error
        from parts p
        left join {schema}.jobs d on d.id = p.node_job
        union all
        -- Of members of maps: their own item, as place -1.
        select j.id, -1, false, n.item,
               coalesce(n.item_value, case when s.state = 'succeeded' then d.result end),
               case when n.item_value is null and (s.state <> 'succeeded' or d.result is null)
                        then coalesce(s.error, {schema}.result_missing(s.name, s.job_id)) end
        from {schema}.jobs j
        join {schema}.workflow_nodes n on n.workflow_id = j.workflow_id and n.place = j.place
        left join {schema}.workflow_nodes s on s.workflow_id = n.workflow_id and s.place = n.item_of
        left join {schema}.jobs d on d.id = s.job_id
        where j.id = any (p_ids) and n.item is not null
    ), sizes as (
        -- Sizes are known without reading the results.
        select g.job_id, sum(octet_length(g.result)) > p_max_bytes as too_large from given g group by g.job_id
    )
    select g.job_id, g.place, g.is_list, g.item, case when not coalesce(z.too_large, false) then g.result end,
           case when z.too_large then '{"code": "INPUTS_TOO_LARGE"}'::jsonb else g.error end
    from given g join sizes z on z.job_id = g.job_id
    order by 1, 2, 4
$body$;
