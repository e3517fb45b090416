-- Schedules: what is enqueued again and again.

-- Enqueue the jobs of a tick and move the schedule on, if it is still as it was read: the row is the lock, so of all who
-- fire at once one comes first and the others match nothing. NULL where nothing was done. The caller sets
-- `lock_timeout`: the unique key of a tick may be held by an open transaction.
create or replace function {schema}.fire_schedule_v1(
    p_name text, p_version bigint, p_next_at double precision, p_last_at double precision, p_event text, p_message text,
    p_count integer, p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns bigint[]
language plpgsql volatile
{fixed_path}
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
