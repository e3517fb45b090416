-- Cancel jobs.

-- Cancel what waits or was only claimed; ask for what runs, and tell its worker at its next beat.
--
-- Of several jobs those that another session has locked just now are left alone ('busy'): a turn locks jobs in an order of
-- its own, and a session that waits for one while holding another would wait for ever. One job alone is waited for.
create or replace function {schema}.cancel_v1(p_ids bigint[], p_by text)
returns table (job_id bigint, answer text, worker_id text)
language plpgsql volatile
{nested_loops}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_free bigint[];
    v_linked bigint[];
    v_workers text[];
begin
    perform {schema}.lock_workflows(p_ids);
    if cardinality(p_ids) = 1 then
        perform 1 from {schema}.jobs j where j.id = p_ids[1] for update;
    end if;
    select array_agg(x.id) into v_free from (
        select j.id from unnest(p_ids) as u(id) join {schema}.jobs j on j.id = u.id for update of j skip locked
    ) x;
    select array_agg(j.id order by j.id) filter (where j.has_links and j.state in ('pending', 'claimed', 'waiting')),
           array_agg(j.worker_id) filter (where j.state = 'running')
    into v_linked, v_workers
    from {schema}.jobs j where j.id = any (v_free);
    return query
    with asked as materialized (
        select distinct u.id from unnest(p_ids) as u(id)
    ), found as materialized (
        select j.id, j.state, j.worker_id from {schema}.jobs j where j.id = any (v_free)
    ), stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, scheduled = false, held = false, blocked = null, awaits_signal = null, finished_at = clock_timestamp(),
            token = null, worker_id = null, claimed_at = null, active_key = null,
            error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = 'cancelled by ' || p_by || ' before it ran',
            error_details = null
        from found f
        where j.id = f.id and f.state in ('pending', 'claimed', 'waiting')
        returning j.id
    ), asked_to_stop as (
        update {schema}.jobs j set cancel_requested = true, unstopped = null
        from found f
        where j.id = f.id and f.state = 'running'
        returning j.workflow_id, j.place
    ), meant as (
        update {schema}.workflow_nodes n set unstop = null
        from asked_to_stop s
        where n.workflow_id = s.workflow_id and n.place = s.place and coalesce(n.unstop, false)
    ), told as (
        insert into {schema}.events (kind, job_id, worker_id, message)
        select case when f.state = 'running' then 'cancel_requested' else 'cancelled' end, f.id, f.worker_id,
               case when f.state = 'running' then p_by || ' asked to cancel it'
                    else 'Cancelled by ' || p_by || ' before it ran' end
        from found f
        where f.state in ('pending', 'claimed', 'waiting', 'running')
    )
    select a.id,
           case when f.id is null then
                    case when exists (select 1 from {schema}.jobs j where j.id = a.id) then 'busy' else 'missing' end
                when f.state in ('pending', 'claimed', 'waiting') then 'cancelled'
                when f.state = 'running' then 'requested'
                else 'finished' end,
           case when f.state in ('claimed', 'running') then f.worker_id end
    from asked a left join found f on f.id = a.id;
    perform {schema}.flag_cancels(v_workers);
    if v_linked is not null then
        perform {schema}.settled(v_linked, array_fill('cancelled'::text, array[cardinality(v_linked)]));
    end if;
end
$body$;

-- Let these workers hear at their next beats that jobs of theirs were asked to stop. In the order of their ids, as those beat
-- whose beats come together: two who took them as they came to them would wait for each other.
create or replace function {schema}.flag_cancels(p_workers text[]) returns void
language plpgsql volatile
{index_scans}
as $body$
begin
    if p_workers is not null then
        perform 1 from {schema}.worker_heartbeats b where b.worker_id = any (p_workers) order by b.worker_id for update;
        update {schema}.worker_heartbeats b set cancels = true where b.worker_id = any (p_workers);
    end if;
end
$body$;
