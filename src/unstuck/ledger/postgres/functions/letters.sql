-- What the exchange of a broker needs beside turns.

-- As `enqueue_v1`, with a letter for those that have a client. A job that is there already gets the new letter: its
-- client came back, perhaps under another identity. What is given back is what `enqueue_v1` gives back.
create or replace function {schema}.post_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[],
    p_clients bytea[], p_services text[], p_request_ids text[], p_letter_places integer[], p_letters integer[],
    p_correlations bytea[], p_own_ids text[], p_notifies boolean[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
{plain_index_scans}
set plan_cache_mode = force_generic_plan
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_places bigint[];
    v_known bigint[];
begin
    select array_agg(k.place), array_agg(k.job_id) into v_places, v_known
    from {schema}.enqueue_v1(
        p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
        p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more) k;
    if v_known is not null then
        -- Nobody removes them from here on; who was removed before gets no letter.
        perform 1 from {schema}.jobs j where j.id = any (v_known) order by j.id for key share;
    end if;
    insert into {schema}.reply_addresses as l (
        job_id, client, service, request_id, place, places, correlation, own_id, notify)
    -- Of two that came with one key the last is answered.
    select distinct on (coalesce(k.job_id, u.id))
           coalesce(k.job_id, u.id), u.client, u.service, u.request_id, u.letter_place, u.letters, u.correlation, u.own_id,
           u.notify
    from unnest(p_ids, p_clients, p_services, p_request_ids, p_letter_places, p_letters, p_correlations, p_own_ids,
                p_notifies)
         with ordinality as u(id, client, service, request_id, letter_place, letters, correlation, own_id, notify, place)
    left join unnest(v_places, v_known) as k(place, job_id) on k.place = u.place
    where u.client is not null
      and (k.job_id is null or exists (select 1 from {schema}.jobs j where j.id = k.job_id))
    order by coalesce(k.job_id, u.id), u.place desc
    on conflict (job_id) do update set
        client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
        places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
        answered_at = null;
    return query select u.place, u.job_id from unnest(v_places, v_known) as u(place, job_id);
end
$body$;

-- Several turns, and what came in beside them, are one transaction: it takes the locks of all of them at once and in their
-- order, as one turn does (`lock_workflows`), and lines when it is done (`end_exchange`).
create or replace function {schema}.begin_exchange_v1(p_workers text[], p_ids bigint[]) returns void
language plpgsql volatile
{index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_flows constant boolean := exists (select 1 from {schema}.workflows);
    v_keys constant boolean := exists (select 1 from {schema}.concurrency_keys);
begin
    if v_flows or v_keys then
        perform 1 from {schema}.workers w where w.id = any (p_workers) order by w.id for share;
    end if;
    if v_flows then
        perform {schema}.lock_workflows(p_ids);
    end if;
    perform {schema}.gather_keys();
end
$body$;

-- Gives the queues in which jobs became ready.
create or replace function {schema}.end_exchange_v1() returns text[]
language plpgsql volatile
{fixed_path}
as $body$
begin
    return {schema}.admit_gathered();
end
$body$;
