-- Open workflows again, and go on past what failed.

-- Open a workflow that has ended again, or that is paused: what failed is tried again, what was cancelled may begin.
create or replace function {schema}.reopen_workflow_v1(p_workflow bigint, p_by text) returns text[]
language plpgsql volatile
{index_scans}
set jit = off
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_scopes integer[] := array[0];
    v_jobs bigint[] := '{}';
    v_more bigint[];
    v_there bigint[];
    v_outer boolean;
    v_woken text[];
begin
    update {schema}.workflows w set state = 'running', finished_at = null
    where w.id = p_workflow and w.state in ('failed', 'cancelled', 'paused');
    if not found then
        return null;
    end if;
    begin
        update {schema}.jobs j set
            state = 'waiting', ready = false, blocked = null, scheduled = false, awaits_signal = 'workflow', finished_at = null,
            result = null, error_code = null, error_message = null, error_cause = null, error_details = null,
            cancel_requested = null, active_key = j.unique_key
        where j.id = p_workflow;
    exception when unique_violation then
        -- While it was over another was started with its unique key.
        perform {schema}.refuse_duplicate(o.id)
        from {schema}.jobs r join {schema}.jobs o on o.active_key = r.unique_key and o.id <> r.id
        where r.id = p_workflow;
        raise exception 'the unique key of workflow % changed hands just now', p_workflow using errcode = '40001';
    end;
    v_outer := {schema}.gather_keys();
    update {schema}.workflow_nodes n set state = 'released', finished_at = null, error = null
    where n.workflow_id = p_workflow and n.place = 0;
    -- From the outside in: what is inside a scope that failed and may have failed is left as it is. What runs still,
    -- though its scope was closed, ends as it will.
    while v_scopes is not null loop
        with again as (
            select n.place, n.kind, j.id as job_id,
                   exists (select 1 from {schema}.workflow_nodes m where m.workflow_id = p_workflow and m.parent = n.place) as has_members
            from {schema}.workflow_nodes n
            left join {schema}.jobs j on j.id = n.job_id and j.state in ('failed', 'cancelled', 'quarantined')
            where n.workflow_id = p_workflow and n.parent = any (v_scopes)
              and (n.state in ('cancelled', 'paused') or n.state = 'failed' and n.on_error <> 'continue')
        ), opened as (
            update {schema}.workflow_nodes n set
                state = case when a.job_id is not null or n.kind = 'group' or a.has_members then 'released' else 'waiting' end,
                job_id = a.job_id, finished_at = null, error = null
            from again a
            where n.workflow_id = p_workflow and n.place = a.place
            returning n.place, n.kind, n.state, n.job_id
        )
        select array_agg(o.job_id) filter (where o.job_id is not null) into v_more from opened o;
        v_jobs := v_jobs || v_more;
        select array_agg(n.place) into v_scopes from {schema}.workflow_nodes n
        where n.workflow_id = p_workflow and n.parent = any (v_scopes) and n.kind <> 'task' and n.state = 'released';
    end loop;
    -- Removed just now, since its workflow was over: its node gets another.
    v_there := array(
        select j.id from {schema}.jobs j where j.id = any (v_jobs) and j.finished_at is not null order by j.id for update);
    if cardinality(v_there) < cardinality(v_jobs) then
        update {schema}.workflow_nodes n set state = 'waiting', job_id = null
        where n.workflow_id = p_workflow and n.state = 'released' and n.job_id = any (v_jobs) and n.job_id <> all (v_there);
    end if;
    perform {schema}.requeue(v_there, p_by);
    perform {schema}.admit(array(select distinct j.concurrency_key from {schema}.jobs j where j.id = any (v_there) and j.concurrency_key is not null));
    -- What runs still was asked to stop, where the workflow was cancelled. That is taken back: should it stop all the same,
    -- since its worker had heard of it, it is tried again. What is in somebody's hands just now is marked, and told by
    -- whoever asked us, each alone: who waits for one while holding another might wait for ever.
    v_more := array(
        select j.id from {schema}.workflow_nodes n join {schema}.jobs j on j.id = n.job_id
        where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.held and j.cancel_requested
        for update of j skip locked);
    update {schema}.jobs j set cancel_requested = null, unstopped = true where j.id = any (v_more);
    update {schema}.workflow_nodes n set unstop = true from {schema}.jobs j
    where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.id = n.job_id
      and coalesce(j.held and j.cancel_requested, false);
    insert into {schema}.events (kind, job_id, message)
    values ('retried', p_workflow, format('Workflow was taken up again by %s', p_by));
    v_woken := {schema}.recount(p_workflow);
    return v_woken || case when v_outer then {schema}.admit_gathered() else '{}' end;
end
$body$;

-- Go on past what is paused: those who depend on it get its error.
create or replace function {schema}.resume_workflow_v1(p_workflow bigint, p_by text) returns text[]
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_woken text[];
    v_outer constant boolean := {schema}.gather_keys();
begin
    perform 1 from {schema}.workflows w where w.id = p_workflow and w.state = 'paused' for update;
    if not found then
        return null;
    end if;
    with gone_on as (
        update {schema}.workflow_nodes n set state = 'failed', on_error = 'continue'
        where n.workflow_id = p_workflow and n.state = 'paused'
        returning n.place
    ) select array_agg(g.place) into v_places from gone_on g;
    update {schema}.workflows w set state = 'running' where w.id = p_workflow;
    insert into {schema}.events (kind, job_id, message)
    values ('workflow_resumed', p_workflow, format('Resumed by %s, past what failed', p_by));
    v_woken := {schema}.move_on(array_fill(p_workflow, array[cardinality(v_places)]), v_places);
    return v_woken || case when v_outer then {schema}.admit_gathered() else '{}' end;
end
$body$;

-- A job was queued again by an operator: its node waits for it again, and so does a workflow that ended with it. Its own
-- job, queued again, means the whole workflow.
create or replace function {schema}.reopen(p_id bigint, p_by text) returns void
language plpgsql volatile
{fixed_path}
as $body$
#variable_conflict use_column
declare
    v_workflow bigint;
    v_place integer;
begin
    select j.workflow_id, j.place into v_workflow, v_place from {schema}.jobs j where j.id = p_id;
    if v_workflow is null then
        return;
    end if;
    perform 1 from {schema}.workflows w where w.id = v_workflow for update;
    if not found then
        return;
    end if;
    if v_place = 0 then
        perform {schema}.reopen_workflow_v1(v_workflow, p_by);
        return;
    end if;
    update {schema}.workflow_nodes n set state = 'released', finished_at = null, error = null
    where n.workflow_id = v_workflow and n.place = v_place and n.job_id = p_id
      and n.state in ('failed', 'cancelled', 'paused') and n.on_error <> 'continue';
    if found then
        if exists (select 1 from {schema}.workflows w where w.id = v_workflow and w.state in ('failed', 'cancelled')) then
            perform {schema}.reopen_workflow_v1(v_workflow, p_by);
        elsif not exists (select 1 from {schema}.workflow_nodes n where n.workflow_id = v_workflow and n.state = 'paused') then
            update {schema}.workflows w set state = 'running' where w.id = v_workflow and w.state = 'paused';
        end if;
    end if;
end
$body$;

-- Count anew what each node and scope of a workflow waits for, from what is known of its nodes, and go on from there. For
-- operators who retry or resume, and for what should be impossible. The caller gathers lines.
create or replace function {schema}.recount(p_workflow bigint) returns text[]
language plpgsql volatile
{index_scans}
set jit = off
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_released record;
    v_woken text[] := '{}';
    v_ended integer[];
begin
    update {schema}.workflow_nodes n set
        blockers = (
            select count(*) from {schema}.workflow_edges e
            join {schema}.workflow_nodes s on s.workflow_id = e.workflow_id and s.place = e.source
            where e.workflow_id = p_workflow and e.target = n.place
              and not (s.state = 'succeeded' or s.state in ('failed', 'cancelled') and s.on_error = 'continue')),
        open = (
            select count(*) from {schema}.workflow_nodes m where m.workflow_id = p_workflow and m.parent = n.place
              and not (m.state = 'succeeded' or m.state in ('failed', 'cancelled') and m.on_error = 'continue'))
    where n.workflow_id = p_workflow;
    select array_agg(n.place order by n.place) into v_places from {schema}.workflow_nodes n
    join {schema}.workflow_nodes p on p.workflow_id = n.workflow_id and p.place = n.parent
    where n.workflow_id = p_workflow and n.state = 'waiting' and n.blockers = 0 and p.state = 'released';
    if v_places is not null then
        select r.* into v_released from {schema}.release(array_fill(p_workflow, array[cardinality(v_places)]), v_places, null) r;
        v_woken := v_released.queues;
        if cardinality(v_released.ended_places) > 0 then
            v_woken := v_woken || {schema}.move_on(v_released.ended_workflows, v_released.ended_places);
        end if;
    end if;
    -- Scopes in which nothing is left, from the inside out: the ends of the inner ones are in `open` of the outer already.
    with done as (
        update {schema}.workflow_nodes n set state = 'succeeded', finished_at = clock_timestamp()
        where n.workflow_id = p_workflow and n.kind <> 'task' and n.state = 'released' and n.open = 0
        returning n.place
    ) select array_agg(d.place) into v_ended from done d;
    if v_ended is not null then
        v_woken := v_woken || {schema}.move_on(array_fill(p_workflow, array[cardinality(v_ended)]), v_ended);
    end if;
    return v_woken;
end
$body$;

-- Take back that this job was asked to stop, where `reopen_workflow` could not. A session that asked anew since then took the
-- mark away, under the same lock on the workflow, and was later: that stands.
create or replace function {schema}.unstop_v1(p_id bigint) returns void
language plpgsql volatile
{index_scans}
set lock_timeout = '500ms'
as $body$
begin
    perform {schema}.lock_workflows(array[p_id]);
    update {schema}.workflow_nodes n set unstop = null from {schema}.jobs j
    where j.id = p_id and n.workflow_id = j.workflow_id and n.place = j.place
      and coalesce(n.unstop and n.job_id = p_id, false);
    if found then
        update {schema}.jobs j set cancel_requested = null, unstopped = true
        where j.id = p_id and coalesce(j.held and j.cancel_requested, false);
    end if;
end
$body$;
