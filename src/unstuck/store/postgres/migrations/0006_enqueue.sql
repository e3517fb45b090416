-- Store jobs under ids that the caller reserved before, so that an uncertain enqueue can be repeated as it was.
--
-- Given back are only the jobs that were not stored because a live job has their unique key, by their place in the
-- batch (from 1), with the id of that job. NULL for a whole array stands for the default in every row.
create function {schema}.enqueue_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $body$
#variable_conflict use_column
declare
    c_rounds constant integer := 100;
    v_left bigint[];
    v_owners bigint[];
begin
    for i in 1 .. c_rounds loop
        -- Both conflicts are good news: the id means that a repeated enqueue had been stored, the key that the
        -- job is there already. Keys go in in their order, so that two batches cannot wait for each other; by bytes,
        -- as the client puts in order what it sends in several pieces.
        insert into {schema}.jobs (
            id, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s, timeout_s, rank,
            enqueued_at, run_at, ready, waiting, unique_key, live_key, enqueued_by)
        select u.id, u.queue, u.task, u.payload, u.payload_type, u.policy, u.on_crash, u.heartbeat,
               u.heartbeat_timeout_s, u.timeout_s, coalesce(u.rank, 0), t.now, r.run_at,
               coalesce(r.run_at <= t.now, true), coalesce(r.run_at > t.now, false), u.unique_key, u.unique_key,
               u.enqueued_by
        from unnest(p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                    p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by)
             with ordinality as u(id, queue, task, payload, payload_type, policy, on_crash, heartbeat,
                    heartbeat_timeout_s, timeout_s, rank, delay_s, run_at, unique_key, enqueued_by, place)
        cross join (select clock_timestamp() as now) t
        cross join lateral (select coalesce(to_timestamp(u.run_at), t.now + make_interval(secs => u.delay_s)) as run_at) r
        where v_left is null or u.place = any (v_left)
        order by u.unique_key collate "C", u.place
        on conflict do nothing;
        exit when p_unique_keys is null;

        -- Who is not there under its own id must be there under its key, unless that job ended in between.
        select array_agg(u.place order by u.place), array_agg(o.id order by u.place) into v_left, v_owners
        from unnest(p_ids, p_unique_keys) with ordinality as u(id, unique_key, place)
        left join lateral (select j.id from {schema}.jobs j where j.live_key = u.unique_key) o on true
        where u.unique_key is not null and not exists (select 1 from {schema}.jobs j where j.id = u.id);
        exit when v_left is null;
        if array_position(v_owners, null) is null then
            return query select * from unnest(v_left, v_owners);
            exit;
        end if;
        if i = c_rounds then
            raise exception 'unique keys changed hands % times during one enqueue', c_rounds using errcode = '40001';
        end if;
    end loop;
end
$body$;
