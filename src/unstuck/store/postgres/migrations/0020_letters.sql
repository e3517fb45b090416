-- Where the answers to jobs go that came in through a broker, and what a broker's exchange needs beside turns.

create table {schema}.letters (
    job_id      bigint primary key,
    -- The identity that the client chose: it must lead to this client alone, also after a restart.
    client      bytea not null constraint client_is_unique check (octet_length(client) between 16 and 255),
    service     text not null,
    -- Groups the calls of one request.
    request_id  text not null,
    place       integer not null check (place >= 0),
    places      integer not null check (places > place),
    correlation bytea,
    -- What the client calls this job.
    own_id      text,
    -- The client wants to hear of deaths.
    notify      boolean not null,
    answered_at timestamptz
);
-- What was answered is not in here, however much there is of it.
create index letters_unanswered on {schema}.letters (client, job_id) where answered_at is null;

-- As `enqueue` (0006), with a letter for those that have a client. A job that is there already gets the new letter: its
-- client came back, perhaps as somebody else. What is given back is what `enqueue` gives back.
create function {schema}.post_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[],
    p_clients bytea[], p_services text[], p_request_ids text[], p_letter_places integer[], p_letters integer[],
    p_correlations bytea[], p_own_ids text[], p_notifies boolean[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_places bigint[];
    v_known bigint[];
begin
    select array_agg(k.place), array_agg(k.job_id) into v_places, v_known
    from {schema}.enqueue_v1(
        p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
        p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by) k;
    if v_known is not null then
        -- Nobody removes them from here on; who was removed before gets no letter.
        perform 1 from {schema}.jobs j where j.id = any (v_known) order by j.id for key share;
    end if;
    insert into {schema}.letters as l (
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

-- As `beat_foreign` (0014), inside a transaction that holds more than beats. That one lets its commit not wait for the
-- disk; what is set in here ends with this function, so the rest of the transaction is as durable as it was.
create function {schema}.beat_foreign_along_v1(p_workers text[], p_running bigint[], p_settled bigint[], p_metadata text[])
returns table (
    n bigint, state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[],
    disabled boolean)
language sql volatile
set search_path = pg_catalog, pg_temp
set synchronous_commit = on
as $body$
    select b.n, b.state, b.was_suspect, b.request, b.cancel_ids, b.cancel_tokens, b.disabled
    from {schema}.beat_foreign_v1(p_workers, p_running, p_settled, p_metadata) b
$body$;
