-- Begin workflows.

-- Begin a workflow: the job that stands for it, its nodes, and the jobs of those that wait for no other. Done again with the
-- same id it changes nothing. Gives the queues of what can begin; NULL where it was there already, or another one has its
-- unique key.
create or replace function {schema}.begin_workflow_v1(
    p_id bigint, p_name text, p_root jsonb, p_nodes jsonb, p_edges jsonb, p_later boolean default false)
returns text[]
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
    v_places integer[];
    v_released record;
    v_woken text[];
    v_outer boolean;
begin
    insert into {schema}.jobs (
        id, queue, task, payload, rank, enqueued_at, run_at, state, ready, scheduled, awaits_signal, unique_key, active_key, enqueued_by,
        has_links, workflow_id, place, hooks, retain_s)
    select p_id, r.queue, r.task, decode(r.payload, 'base64'), coalesce(r.rank, 0), v_now, v_now, 'waiting', false, false,
           'workflow', r.unique_key, r.unique_key, r.enqueued_by, true, p_id, 0, r.more -> 'hooks',
           (r.more ->> 'retain_s')::double precision
    from jsonb_to_record(p_root) as r(
        queue text, task text, payload text, rank integer, unique_key text, enqueued_by text, more jsonb)
    on conflict do nothing;
    if not found then
        return null;
    end if;
    insert into {schema}.workflows (id, name, created_at) values (p_id, p_name, v_now);
    insert into {schema}.workflow_nodes (
        workflow_id, place, parent, name, kind, state, on_error, blockers, open, source)
    select p_id, n.place, n.parent, n.name, n.kind, case when n.kind = 'group' then 'released' else 'waiting' end,
           n.on_error, n.blockers, n.open, n.source
    from jsonb_to_recordset(p_nodes) as n(
        place integer, parent integer, name text, kind text, on_error text, blockers integer, open integer, source integer);
    insert into {schema}.node_jobs (
        workflow_id, place, needs_inputs, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s,
        timeout_s, rank, delay_s, enqueued_by, more)
    select p_id, n.place, n.needs_inputs, s.queue, s.task, decode(s.payload, 'base64'), s.payload_type, decode(s.policy, 'base64'),
           s.on_crash, s.heartbeat, s.heartbeat_timeout_s, s.timeout_s, s.rank, s.delay_s, s.enqueued_by, s.more
    from jsonb_to_recordset(p_nodes) as n(place integer, needs_inputs boolean, spec jsonb)
    cross join lateral jsonb_to_record(n.spec) as s(
        queue text, task text, payload text, payload_type text, policy text, on_crash text, heartbeat boolean,
        heartbeat_timeout_s double precision, timeout_s double precision, rank integer, delay_s double precision,
        enqueued_by text, more jsonb)
    where n.spec is not null;
    insert into {schema}.workflow_edges (workflow_id, source, target, data)
    select p_id, (e.value ->> 0)::integer, (e.value ->> 1)::integer, (e.value ->> 2)::boolean
    from jsonb_array_elements(p_edges) as e(value);
    select array_agg(n.place order by n.place) into v_places from {schema}.workflow_nodes n
    where n.workflow_id = p_id and n.state = 'waiting' and n.blockers = 0;
    v_outer := {schema}.gather_keys();
    select r.* into v_released from {schema}.release(array_fill(p_id, array[cardinality(v_places)]), v_places, null) r;
    v_woken := v_released.queues;
    if cardinality(v_released.ended_places) > 0 then
        v_woken := v_woken || {schema}.move_on(v_released.ended_workflows, v_released.ended_places);
    end if;
    if p_later and v_outer then
        perform {schema}.postpone_gathered();
        return v_woken;
    end if;
    return v_woken || case when v_outer then {schema}.admit_gathered() else '{}' end;
end
$body$;

-- The same once per request, however often it is sent (see `enqueue_once`).
create or replace function {schema}.begin_workflow_once_v1(
    p_key bytea, p_fingerprint bytea, p_keep_s double precision, p_id bigint, p_unique_key text, p_name text, p_root jsonb,
    p_nodes jsonb, p_edges jsonb)
returns table (first boolean, fingerprint bytea, job_ids bigint[], fresh boolean[], queues text[])
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    c_rounds constant integer := 100;
    v_first constant boolean := {schema}.is_first(p_key, p_fingerprint, p_keep_s);
    v_queues text[];
    v_owner bigint;
begin
    if v_first then
        for i in 1 .. c_rounds loop
            v_queues := {schema}.begin_workflow_v1(p_id, p_name, p_root, p_nodes, p_edges);
            exit when v_queues is not null;
            -- Another one has its key, unless that ended in between.
            select j.id into v_owner from {schema}.jobs j where j.active_key = p_unique_key;
            exit when found;
            if i = c_rounds then
                raise exception 'a unique key changed hands % times during one request', c_rounds using errcode = '40001';
            end if;
        end loop;
        update {schema}.requests r set job_ids = array[coalesce(v_owner, p_id)], fresh = array[v_owner is null]
        where r.key = p_key;
    end if;
    return query
    select v_first, r.fingerprint, r.job_ids, r.fresh, v_queues from {schema}.requests r where r.key = p_key;
end
$body$;
