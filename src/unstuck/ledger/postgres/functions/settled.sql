-- Tell workflows, concurrency keys and hooks that attempts ended.

-- Tell all others that are concerned that attempts at these jobs ended, each as it ended (`succeeded`, `failed`, `crashed`,
-- `drained`, `cancelled`, `suspended`). In the transaction that ended them. Gives the queues in which
-- jobs became ready by it.
--
-- The caller has locked the workflows, before the jobs (`lock_workflows`). Lines come last and all at once
-- (`gather_keys`): a node that a workflow releases may stand in the line that another node of it leaves, and a session
-- that holds a line never waits.
create or replace function {schema}.settled(p_ids bigint[], p_as text[]) returns text[]
language plpgsql volatile
{index_scans}
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
declare
    v_nodes bigint[];
    v_workflows bigint[];
    v_places integer[];
    v_hooked boolean;
    v_keyed boolean;
begin
    if cardinality(p_ids) = 0 then
        return '{}';
    end if;
    select array_agg(j.id) filter (where j.workflow_id is not null and j.finished_at is not null),
           array_agg(j.workflow_id) filter (where j.workflow_id is not null and j.finished_at is not null),
           array_agg(j.place) filter (where j.workflow_id is not null and j.finished_at is not null),
           bool_or(j.hooks is not null), bool_or(j.concurrency_key is not null)
    into v_nodes, v_workflows, v_places, v_hooked, v_keyed
    from unnest(p_ids) as u(id)
    join {schema}.jobs j on j.id = u.id;
    return {schema}.pass_on(p_ids, p_as, v_nodes, v_workflows, v_places, v_hooked, v_keyed, null);
end
$body$;

-- As `settled`, for a caller that knows what these jobs are tied to: which of them are over and nodes of workflows, and
-- at which places; whether any has hooks or stands in a line; and, where all of them succeeded, when.
create or replace function {schema}.pass_on(
    p_ids bigint[], p_as text[], p_nodes bigint[], p_workflows bigint[], p_places integer[], p_hooked boolean,
    p_keyed boolean, p_succeeded_at timestamptz) returns text[]
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_outer constant boolean := {schema}.gather_keys();
    v_woken text[] := '{}';
begin
    if p_nodes is not null then
        v_woken := {schema}.advance(p_nodes, p_workflows, p_places, p_succeeded_at);
    end if;
    if p_hooked then
        v_woken := v_woken || {schema}.fire_hooks(p_ids, p_as);
    end if;
    if p_keyed or exists (select 1 from {schema}.queues k where k.concurrency is not null) then
        v_woken := v_woken || {schema}.leave_keys(p_ids);
    end if;
    return v_woken || case when v_outer then {schema}.admit_gathered() else '{}' end;
end
$body$;
