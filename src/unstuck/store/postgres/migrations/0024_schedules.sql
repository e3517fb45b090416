-- Schedules: what is enqueued again and again, and when next.

create table {schema}.schedules (
    name text primary key,
    source text not null check (source in ('app', 'operator')),
    -- Of the whole definition: only who knows it exactly so fires it.
    fingerprint text not null,
    task text not null,
    queue text not null,
    cron text,
    every_s double precision,
    zone text not null,
    catch_up text not null check (catch_up in ('skip', 'latest', 'all')),
    -- The job of each tick, packed.
    job bytea not null,
    paused boolean not null default false,
    paused_by text,
    next_at timestamptz,
    last_at timestamptz,
    fired_at timestamptz,
    last_job_id bigint,
    -- Grows with every change: whoever fires must have read the last one.
    version bigint not null default 1,
    changed_at timestamptz not null default clock_timestamp(),
    check ((cron is null) <> (every_s is null))
);

-- Enqueue the jobs of a tick and move the schedule on, if it is still as it was read: the row is the lock, so of all who
-- fire at once one comes first and the others match nothing. NULL where nothing was done.
create function {schema}.fire_schedule_v1(
    p_name text, p_version bigint, p_next_at double precision, p_last_at double precision, p_event text, p_message text,
    p_count integer, p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
-- A unique key that an open transaction holds: whoever fires comes again later, and heartbeats do not wait for it.
set lock_timeout = '100ms'
as $body$
declare
    v_ids bigint[] := '{}';
    v_version bigint;
begin
    select s.version into v_version from {schema}.schedules s where s.name = p_name and not s.paused for update;
    if v_version is distinct from p_version then
        return null;
    end if;
    if p_count > 0 then
        select array_agg(nextval('{schema}.job_ids'::regclass)) into v_ids from generate_series(1, p_count);
        select array_agg(coalesce(k.job_id, i.id) order by i.place) into v_ids
        from unnest(v_ids) with ordinality as i(id, place)
        left join {schema}.enqueue_v1(
            v_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
            p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more) k
            on k.place = i.place;
    end if;
    update {schema}.schedules s set
        next_at = to_timestamp(p_next_at), last_at = coalesce(to_timestamp(p_last_at), s.last_at),
        fired_at = case when p_count > 0 then clock_timestamp() else s.fired_at end,
        last_job_id = coalesce(v_ids[cardinality(v_ids)], s.last_job_id), version = s.version + 1
    where s.name = p_name;
    if p_event is not null then
        insert into {schema}.events (kind, about, message) values (p_event, 'schedule:' || p_name, p_message);
    end if;
    return v_ids;
end
$body$;
