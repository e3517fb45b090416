-- Find and repair workflows that do not go on.

-- Find what should be impossible (rows edited by hand, restored from a backup), repair it by the same ways, and say so.
--
-- Looked at are the workflows behind `p_after` that go on, as many as have `p_look` nodes together, in the order of ids: a
-- stretch at a time, so that a round costs the same however much there is. Gives the workflows, what was wrong, and the
-- queues in which jobs became ready; in a last row, without a workflow, where to go on (NULL: it was the end).
create or replace function {schema}.repair_workflows_v1(p_after bigint, p_look integer, p_limit integer)
returns table (workflow_id bigint, what text, queues text[], next_after bigint)
language plpgsql volatile
{loops_as_written}
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_found record;
    v_ids bigint[] := '{}';
    v_left integer := p_look;
    v_end bigint;
    v_outer constant boolean := {schema}.gather_keys();
begin
    for v_found in
        select w.id, (select max(n.place) from {schema}.workflow_nodes n where n.workflow_id = w.id) as nodes
        from {schema}.workflows w where w.finished_at is null and w.id > p_after order by w.id
    loop
        v_ids := v_ids || v_found.id;
        v_left := v_left - coalesce(v_found.nodes, 0) - 1;
        if v_left <= 0 then
            v_end := v_found.id;
            exit;
        end if;
    end loop;
    -- Jobs that are over, or gone, while their nodes wait for them.
    for v_found in
        select n.workflow_id, n.place, n.name, n.job_id, j.id as there, j.state
        from unnest(v_ids) with ordinality as u(id, n)
        join {schema}.workflow_nodes n on n.workflow_id = u.id
        left join {schema}.jobs j on j.id = n.job_id
        where coalesce(n.state = 'released' and n.kind = 'task', false) and (j.id is null or j.finished_at is not null)
        order by u.n, n.place
        limit p_limit
    loop
        workflow_id := v_found.workflow_id;
        -- Not waited for: what was repaired before it is in our hands.
        perform 1 from {schema}.workflows w where w.id = v_found.workflow_id for update skip locked;
        continue when not found;
        if v_found.there is not null then
            what := format('node %s waited for job %s, which is %s', v_found.name, v_found.job_id, v_found.state);
            queues := {schema}.advance(array[v_found.job_id], array[v_found.workflow_id], array[v_found.place]);
        else
            what := format('node %s waited for job %s, which is not there any more', v_found.name, v_found.job_id);
            update {schema}.workflow_nodes n set state = 'failed', finished_at = clock_timestamp(), error = {schema}.result_missing(n.name, n.job_id)
            where n.workflow_id = v_found.workflow_id and n.place = v_found.place and n.state = 'released'
              and n.job_id is not distinct from v_found.job_id;
            continue when not found;
            queues := {schema}.move_on(array[v_found.workflow_id], array[v_found.place]);
        end if;
        return next;
    end loop;
    -- Workflows that go on in which nothing does.
    for v_found in
        select w.id from {schema}.workflows w
        where w.id = any (v_ids) and w.state = 'running'
          and not exists (select 1 from {schema}.workflow_nodes n
                          where n.workflow_id = w.id and coalesce(n.state = 'released' and n.kind = 'task', false))
        order by w.id
        limit p_limit
        for update skip locked
    loop
        workflow_id := v_found.id;
        what := 'nothing of it went on';
        queues := {schema}.recount(v_found.id);
        return next;
    end loop;
    workflow_id := null;
    what := null;
    queues := case when v_outer then {schema}.admit_gathered() else '{}' end;
    next_after := v_end;
    return next;
end
$body$;
