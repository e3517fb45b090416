-- Move workflows on. Settling a job, resolving its node, releasing those that waited for it and finishing the workflow
-- are one transaction.

-- These jobs are over, and so are their nodes, at these places; where the job of a workflow itself was cancelled, nothing of
-- it is begun any more. The caller has locked the workflows, and gathers lines.
--
-- `p_succeeded_at` says that all of them succeeded, and when, where that is known: then their jobs are not read again.
create or replace function {schema}.advance(
    p_ids bigint[], p_workflows bigint[], p_places integer[], p_succeeded_at timestamptz default null) returns text[]
language plpgsql volatile
{loops_as_written}
as $body$
#variable_conflict use_column
declare
    v_workflows bigint[];
    v_places integer[];
    v_parents integer[];
    v_good boolean[];
    v_woken text[] := '{}';
    v_root bigint;
begin
    -- The whole before its parts: who gave up both gave up the workflow, it did not fail.
    if 0 = any (p_places) then
        for v_root in
            select w.id from {schema}.workflows w join {schema}.jobs j on j.id = w.id
            where w.id = any (p_ids) and w.finished_at is null and j.finished_at is not null
            order by w.id
        loop
            v_woken := v_woken || {schema}.cancel_workflow(v_root);
        end loop;
    end if;
    if p_succeeded_at is not null then
        with ended as (
            update {schema}.workflow_nodes n set state = 'succeeded', finished_at = p_succeeded_at, error = null
            from unnest(p_ids, p_workflows, p_places) as u(id, workflow_id, place)
            where n.workflow_id = u.workflow_id and n.place = u.place
              and coalesce(u.place > 0 and n.state = 'released' and n.job_id = u.id, false)
            returning n.workflow_id, n.place, n.parent
        )
        select array_agg(e.workflow_id), array_agg(e.place), array_agg(e.parent) into v_workflows, v_places, v_parents
        from ended e;
        v_good := array_fill(true, array[coalesce(cardinality(v_workflows), 0)]);
    else
        with ended as (
            update {schema}.workflow_nodes n set
                state = case when j.state = 'succeeded' and j.result is not null then 'succeeded'
                             when j.state = 'cancelled' then 'cancelled' else 'failed' end,
                finished_at = j.finished_at,
                error = case when j.state <> 'succeeded' or j.result is null then {schema}.node_error(n.name, j) end
            from unnest(p_ids, p_workflows, p_places) as u(id, workflow_id, place)
            join {schema}.jobs j on j.id = u.id
            where n.workflow_id = u.workflow_id and n.place = u.place
              and coalesce(u.place > 0 and j.finished_at is not null and n.state = 'released' and n.job_id = j.id, false)
            returning n.workflow_id, n.place, n.parent, n.state = 'succeeded' or n.on_error = 'continue' as good
        )
        select array_agg(e.workflow_id), array_agg(e.place), array_agg(e.parent), array_agg(e.good)
        into v_workflows, v_places, v_parents, v_good from ended e;
    end if;
    if v_workflows is not null then
        v_woken := v_woken || {schema}.move_on(v_workflows, v_places, v_parents, v_good);
    end if;
    return v_woken;
end
$body$;

-- Plans: joins are done in the order in which they are written, from the few that are given along the keys: statistics of
-- tables that were empty a moment ago must not turn that round.
--
-- Move workflows on after these nodes ended, round by round: those that waited for them are released, scopes in which
-- nothing is left end, scopes that may not go on are closed. The caller has locked the workflows, and gathers lines.
--
-- `p_parents` and `p_good` say of each what it is in and whether it ended well enough, where that is known already.
create or replace function {schema}.move_on(
    p_workflows bigint[], p_places integer[], p_parents integer[] default null, p_good boolean[] default null) returns text[]
language plpgsql volatile
{loops_as_written}
as $body$
#variable_conflict use_column
declare
    v_workflows bigint[] := p_workflows;
    v_places integer[] := p_places;
    v_parents integer[] := p_parents;
    v_good boolean[] := p_good;
    v_closed_workflows bigint[];
    v_closed_places integer[];
    v_good_workflows bigint[];
    v_good_places integer[];
    v_good_parents integer[];
    v_bad_workflows bigint[];
    v_bad_places integer[];
    v_next_workflows bigint[];
    v_next_places integer[];
    v_freed_workflows bigint[];
    v_freed_places integer[];
    v_freed integer[];
    v_bad record;
    v_released record;
    v_woken text[] := '{}';
begin
    while cardinality(v_workflows) > 0 loop
        v_next_workflows := '{}';
        v_next_places := '{}';
        -- The outermost scope is over: so is its workflow.
        if 0 = any (v_places) then
            v_woken := v_woken || {schema}.finish_workflows(array(
                select u.workflow_id from unnest(v_workflows, v_places) as u(workflow_id, place) where u.place = 0));
        end if;
        if v_parents is null then
            select array_agg(n.workflow_id), array_agg(n.place), array_agg(n.parent),
                   array_agg(n.state = 'succeeded' or n.on_error = 'continue')
            into v_workflows, v_places, v_parents, v_good
            from unnest(v_workflows, v_places) as u(workflow_id, place)
            join {schema}.workflow_nodes n on n.workflow_id = u.workflow_id and n.place = u.place
            where n.parent is not null;
        end if;
        -- What is left counts only while the scope around it is open.
        select array_agg(p.workflow_id), array_agg(p.place) into v_closed_workflows, v_closed_places
        from (select u.workflow_id, u.place from unnest(v_workflows, v_parents) as u(workflow_id, place) group by 1, 2) s
        join {schema}.workflow_nodes p on p.workflow_id = s.workflow_id and p.place = s.place
        where coalesce(p.state <> 'released', false);
        v_good_workflows := v_workflows;
        v_good_places := v_places;
        v_good_parents := v_parents;
        v_bad_workflows := null;
        if v_closed_places is not null or false = any (v_good) then
            select array_agg(u.workflow_id) filter (where u.good), array_agg(u.place) filter (where u.good),
                   array_agg(u.parent) filter (where u.good),
                   array_agg(u.workflow_id) filter (where not u.good), array_agg(u.place) filter (where not u.good)
            into v_good_workflows, v_good_places, v_good_parents, v_bad_workflows, v_bad_places
            from unnest(v_workflows, v_places, v_parents, v_good) as u(workflow_id, place, parent, good)
            where v_closed_places is null
               or (u.workflow_id, u.parent) not in (
                   select c.workflow_id, c.place from unnest(v_closed_workflows, v_closed_places) as c(workflow_id, place));
        end if;
        if v_bad_workflows is not null then
            -- Sorted before the join: an order behind it makes the planner walk through all nodes that there are.
            for v_bad in
                select n.workflow_id, n.place, n.parent, n.name, n.on_error, n.error
                from (
                    select x.workflow_id, x.place from unnest(v_bad_workflows, v_bad_places) as x(workflow_id, place)
                    order by x.workflow_id, x.place
                ) u
                cross join lateral (
                    select m.* from {schema}.workflow_nodes m where m.workflow_id = u.workflow_id and m.place = u.place limit 1
                ) n
                where coalesce(n.state in ('failed', 'cancelled'), false)
            loop
                if v_bad.on_error = 'pause' then
                    update {schema}.workflow_nodes n set state = 'paused' where n.workflow_id = v_bad.workflow_id and n.place = v_bad.place;
                    update {schema}.workflows w set state = 'paused' where w.id = v_bad.workflow_id and w.state = 'running';
                    insert into {schema}.events (kind, job_id, message)
                    values ('workflow_paused', v_bad.workflow_id, left(format(
                        'Node %s failed (%s) and waits for an operator: %s', v_bad.name, v_bad.error ->> 'code',
                        coalesce(v_bad.error ->> 'cause', v_bad.error ->> 'message')), 500));
                    continue;
                end if;
                -- Of several that failed at once the first one decides.
                update {schema}.workflow_nodes n set state = 'failed', finished_at = clock_timestamp(), error = v_bad.error
                where n.workflow_id = v_bad.workflow_id and n.place = v_bad.parent and n.state = 'released';
                if found then
                    v_woken := v_woken || {schema}.close_scope(
                        v_bad.workflow_id, v_bad.parent, format('node %s failed before it', v_bad.name));
                    v_next_workflows := v_next_workflows || v_bad.workflow_id;
                    v_next_places := v_next_places || v_bad.parent;
                end if;
            end loop;
        end if;

        v_freed_workflows := null;
        if v_good_workflows is not null then
            select array_agg(f.workflow_id), array_agg(f.target), array_agg(f.n)
            into v_freed_workflows, v_freed_places, v_freed
            from (
                select e.workflow_id, e.target, count(*)::integer as n
                from unnest(v_good_workflows, v_good_places) as u(workflow_id, place)
                join {schema}.workflow_edges e on e.workflow_id = u.workflow_id and e.source = u.place
                group by e.workflow_id, e.target
            ) f;
            with left_open as (
                select u.workflow_id, u.parent, count(*) as n
                from unnest(v_good_workflows, v_good_parents) as u(workflow_id, parent)
                group by u.workflow_id, u.parent
            ), told as (
                update {schema}.workflow_nodes s set
                    open = s.open - l.n,
                    state = case when s.open = l.n and s.state = 'released' then 'succeeded' else s.state end,
                    finished_at = case when s.open = l.n and s.state = 'released' then clock_timestamp() else s.finished_at end
                from left_open l
                where s.workflow_id = l.workflow_id and s.place = l.parent
                returning s.workflow_id, s.place, s.open, s.state
            )
            select v_next_workflows || array_agg(t.workflow_id), v_next_places || array_agg(t.place)
            into v_next_workflows, v_next_places
            from told t where t.open = 0 and t.state = 'succeeded';
        end if;
        if v_freed_workflows is not null then
            select r.* into v_released from {schema}.release(v_freed_workflows, v_freed_places, v_freed) r;
            v_woken := v_woken || v_released.queues;
            v_next_workflows := v_next_workflows || v_released.ended_workflows;
            v_next_places := v_next_places || v_released.ended_places;
        end if;
        v_workflows := v_next_workflows;
        v_places := v_next_places;
        v_parents := null;
    end loop;
    return v_woken;
end
$body$;

-- End a scope early: what is in it and was not begun is cancelled. What runs goes on, and its end changes nothing any more.
-- Gives the queues in which others may go on.
create or replace function {schema}.close_scope(p_workflow bigint, p_scope integer, p_cause text) returns text[]
language plpgsql volatile
{index_scans}
set jit = off
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_inside bigint[];
    v_jobs bigint[];
    v_now timestamptz := clock_timestamp();
begin
    with recursive inside as (
        select n.place, n.job_id from {schema}.workflow_nodes n where n.workflow_id = p_workflow and n.parent = p_scope
        union all
        select n.place, n.job_id from inside i
        join {schema}.workflow_nodes n on n.workflow_id = p_workflow and n.parent = i.place
    )
    select array_agg(i.place), array_agg(i.job_id) filter (where i.job_id is not null) into v_places, v_inside from inside i;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, scheduled = false, blocked = null, awaits_signal = null, finished_at = v_now,
            active_key = null, error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = p_cause,
            error_details = null
        where j.id = any (v_inside) and j.state in ('pending', 'waiting')
        returning j.id
    )
    select array_agg(s.id order by s.id) into v_jobs from stopped s;
    -- What was claimed and not begun is taken back: its worker finds out when it would start it. What is in somebody's hands
    -- at this moment is just beginning; and to wait for those, with others of that worker in hand, may be to wait for ever.
    with unbegun as materialized (
        select j.id from {schema}.jobs j where j.id = any (v_inside) and j.state = 'claimed' for update skip locked
    ), stopped as (
        update {schema}.jobs j set
            state = 'cancelled', held = false, token = null, worker_id = null, claimed_at = null, finished_at = v_now,
            active_key = null, error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = p_cause,
            error_details = null
        from unbegun u
        where j.id = u.id
        returning j.id
    )
    select v_jobs || array_agg(s.id order by s.id) into v_jobs from stopped s;
    insert into {schema}.events (at, kind, job_id, message)
    select v_now, 'cancelled', u.id, left('CANCELLED: ' || p_cause, 500) from unnest(v_jobs) as u(id);
    update {schema}.workflow_nodes n set
        state = 'cancelled', finished_at = v_now,
        error = jsonb_build_object('node', n.name, 'job_id', n.job_id, 'code', 'TASK_CANCELLED',
                                   'message', 'It was not begun', 'cause', p_cause)
    where n.workflow_id = p_workflow and n.place = any (v_places)
      and (n.state in ('waiting', 'paused') or n.state = 'released' and (n.kind <> 'task' or n.job_id = any (v_jobs)));
    -- What waited for an operator may have been in there.
    update {schema}.workflows w set state = 'running'
    where w.id = p_workflow and w.state = 'paused'
      and not exists (select 1 from {schema}.workflow_nodes n where n.workflow_id = p_workflow and n.state = 'paused');
    return case when v_jobs is null then '{}' else {schema}.leave_keys(v_jobs) end;
end
$body$;

-- Write the ends of whole workflows: of their rows, and of the jobs that stand for them. Gives the queues in which there is
-- work by it.
create or replace function {schema}.finish_workflows(p_workflows bigint[]) returns text[]
language plpgsql volatile
{nested_loops}
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
#variable_conflict use_column
declare
    c_bytes constant integer := 67108864;
    v_now constant timestamptz := clock_timestamp();
    v_hooked bigint[];
    v_hooked_as text[];
begin
    with roots as materialized (
        select n.workflow_id as id, n.state, n.error,
               case when n.state = 'succeeded' then convert_to({schema}.node_result(n.workflow_id, 0), 'UTF8') end as result
        from unnest(p_workflows) as u(id)
        -- With a limit, or the planner might look for the place in all workflows that there are.
        cross join lateral (select m.* from {schema}.workflow_nodes m where m.workflow_id = u.id and m.place = 0 limit 1) n
    ), outcomes as materialized (
        select r.id, r.state, case when octet_length(r.result) <= c_bytes then r.result end as result,
               case when octet_length(r.result) > c_bytes then jsonb_build_object(
                        'code', 'RESULT_NOT_STORABLE', 'message', 'Result cannot be stored',
                        'cause', format('the results of the workflow together are over %s bytes', c_bytes))
                    else r.error end as error
        from roots r
    ), ends as materialized (
        select o.id, o.result, o.error,
               case when o.error is null then 'succeeded' when o.state = 'cancelled' then 'cancelled' else 'failed' end as state
        from outcomes o
    ), flows as (
        update {schema}.workflows w set state = e.state, finished_at = v_now from ends e where w.id = e.id
    ), stands as (
        update {schema}.jobs j set
            state = e.state, scheduled = false, awaits_signal = null, finished_at = v_now, result = e.result, active_key = null,
            error_code = case when e.state = 'cancelled' then 'CANCELLED' else e.error ->> 'code' end,
            error_message = e.error ->> 'message', error_cause = e.error ->> 'cause',
            error_details = case when e.error is not null then jsonb_build_object(
                'node', e.error ->> 'node', 'node_job_id', e.error -> 'job_id') end
        from ends e
        where j.id = e.id and coalesce(j.finished_at is null, false)
        returning j.id, j.state, j.hooks is not null as hooked
    ), told as (
        insert into {schema}.events (at, kind, job_id, message)
        select v_now, e.state, e.id,
               left(concat_ws(': ', e.error ->> 'code', 'node ' || (e.error ->> 'node'),
                              coalesce(e.error ->> 'cause', e.error ->> 'message')), 500)
        from ends e where e.error is not null
    )
    select array_agg(s.id order by s.id), array_agg(s.state order by s.id) into v_hooked, v_hooked_as
    from stands s where s.hooked;
    return case when v_hooked is null then '{}' else {schema}.fire_hooks(v_hooked, v_hooked_as) end;
end
$body$;

-- The job that stands for a workflow was cancelled: so is what was not begun, and what runs is asked to stop. A job that
-- another session has locked just now may be ending, and then that session waits for the workflow: our caller asks those
-- by themselves, when it is done (see `nodes_to_stop`).
create or replace function {schema}.cancel_workflow(p_workflow bigint) returns text[]
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_woken text[];
    v_workers text[];
begin
    v_woken := {schema}.close_scope(p_workflow, 0, format('workflow %s was cancelled', p_workflow));
    with free as materialized (
        select j.id from {schema}.workflow_nodes n join {schema}.jobs j on j.id = n.job_id
        where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.held
        for update of j skip locked
    ), asked as (
        update {schema}.jobs j set cancel_requested = true, unstopped = null from free f where j.id = f.id returning j.worker_id
    )
    select array_agg(a.worker_id) into v_workers from asked a;
    perform {schema}.flag_cancels(v_workers);
    update {schema}.workflow_nodes n set unstop = null where n.workflow_id = p_workflow and coalesce(n.unstop, false);
    update {schema}.workflow_nodes n set
        state = 'cancelled', finished_at = clock_timestamp(),
        error = jsonb_build_object('node', n.name, 'code', 'TASK_CANCELLED', 'message', 'Workflow was cancelled')
    where n.workflow_id = p_workflow and n.place = 0;
    update {schema}.workflows w set state = 'cancelled', finished_at = clock_timestamp() where w.id = p_workflow;
    return v_woken;
end
$body$;
