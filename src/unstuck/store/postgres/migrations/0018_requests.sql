-- Requests that must not be done twice: what was enqueued under an idempotency key, also after those jobs ended.

create table {schema}.requests (
    -- A hash of who asked and of their key: of one length whatever they chose, and nobody meets another's.
    key         bytea primary key,
    -- A hash of what was asked for: the same key with something else is a mistake, and is told.
    fingerprint bytea not null,
    at          timestamptz not null default clock_timestamp(),
    job_ids     bigint[] not null,
    fresh       boolean[] not null
);
create index requests_by_age on {schema}.requests (at);

-- Enqueue unless it was done under this key within `p_keep_s`; either way give what is stored for the key.
--
-- In one transaction: jobs without their key would be stored again by the next try, a key without its jobs would lose
-- them.
create function {schema}.enqueue_once_v1(
    p_key bytea, p_fingerprint bytea, p_keep_s double precision,
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[])
returns table (first boolean, fingerprint bytea, job_ids bigint[], fresh boolean[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
#variable_conflict use_column
declare
    -- Whoever comes clears away a few that are too old: so the table stays as small as what comes in.
    c_cleared constant integer := 20;
    v_first boolean;
    v_before constant timestamptz := clock_timestamp() - make_interval(secs => p_keep_s);
begin
    delete from {schema}.requests r
    where r.key in (
        select o.key from {schema}.requests o where o.at < v_before order by o.at limit c_cleared for update skip locked);
    -- The second of two who come at once with the same key waits here until the first has committed.
    insert into {schema}.requests as r (key, fingerprint, job_ids, fresh)
    values (p_key, p_fingerprint, array[]::bigint[], array[]::boolean[])
    on conflict (key) do update set fingerprint = excluded.fingerprint, at = clock_timestamp() where r.at < v_before;
    v_first := found;
    if v_first then
        update {schema}.requests r
        set (job_ids, fresh) = (
            select array_agg(coalesce(k.job_id, i.id) order by i.place), array_agg(k.job_id is null order by i.place)
            from unnest(p_ids) with ordinality as i(id, place)
            left join {schema}.enqueue_v1(
                p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by) k
                on k.place = i.place)
        where r.key = p_key;
    end if;
    return query select v_first, r.fingerprint, r.job_ids, r.fresh from {schema}.requests r where r.key = p_key;
end
$body$;
