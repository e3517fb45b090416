-- Store jobs.

-- Store jobs under ids that the caller reserved before, so that an uncertain enqueue can be repeated as it was.
--
-- Given back are only the jobs that were not stored because a live job has their unique key, by their place in the
-- batch (from 1), with the id of that job. NULL for a whole array stands for the default in every row. `p_more` has what
-- few jobs have: line and line_limit, hooks, expires_in_s, keep_s, and for their unique keys unique,
-- unique_for_s and on_duplicate (see `unique_keys.sql`).
create or replace function {schema}.enqueue_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
{nested_loops}
as $body$
#variable_conflict use_column
declare
    c_rounds constant integer := 100;
    v_left bigint[];
    v_owners bigint[];
    v_kept bigint[];
    v_keepers bigint[];
    v_peculiar constant boolean := p_more is not null and p_unique_keys is not null;
    -- The transaction goes on after this, perhaps for long: it must take no lock that workers need.
    v_later constant boolean := v_peculiar and exists (select 1 from unnest(p_more) as m where m ? 'later');
    v_outer boolean := false;
begin
    if v_peculiar then
        -- Who is replaced leaves a line, before we join ours.
        v_outer := {schema}.gather_keys();
        -- Keys that are kept for a period are in a table of their own: who finds one there is not stored.
        select array_agg(k.place), array_agg(k.job_id) into v_kept, v_keepers from {schema}.keep_keys(p_ids, p_unique_keys, p_more) k;
        return query select * from unnest(v_kept, v_keepers);
    end if;
    for i in 1 .. c_rounds loop
        -- Both conflicts are good news: the id means that a repeated enqueue had been stored, the key that the
        -- job is there already. Keys go in in their order, so that two batches cannot wait for each other; by bytes,
        -- as the client puts in order what it sends in several pieces.
        insert into {schema}.jobs (
            id, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s, timeout_s, rank,
            enqueued_at, run_at, ready, scheduled, blocked, unique_key, active_key, enqueued_by, has_links, concurrency_key,
            hooks, expires_at, retain_s, concurrency_limit, unique_for)
        select u.id, u.queue, u.task, u.payload, u.payload_type, u.policy, u.on_crash, u.heartbeat,
               u.heartbeat_timeout_s, u.timeout_s, coalesce(u.rank, 0), t.now, r.run_at,
               coalesce(r.run_at <= t.now, true) and m.concurrency_key is null, coalesce(r.run_at > t.now, false) or m.later,
               case when m.concurrency_key is not null and coalesce(r.run_at <= t.now, true) and not m.later then true end, u.unique_key,
               case when m.unique_for is distinct from 'period' then u.unique_key end,
               u.enqueued_by, case when m.concurrency_key is not null or m.hooks is not null then true end, m.concurrency_key, m.hooks,
               greatest(t.now, r.run_at) + make_interval(secs => m.expires_in_s), m.retain_s, m.concurrency_limit, m.unique_for
        from unnest(p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                    p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more)
             with ordinality as u(id, queue, task, payload, payload_type, policy, on_crash, heartbeat,
                    heartbeat_timeout_s, timeout_s, rank, delay_s, run_at, unique_key, enqueued_by, more, n)
        cross join (select clock_timestamp() as now) t
        cross join lateral (
            -- Who may not stand in line while their transaction lasts is due at once, and let in when it is there.
            select coalesce(to_timestamp(u.run_at), t.now + make_interval(secs => u.delay_s),
                            case when u.more ? 'concurrency_key' and u.more ? 'later' then t.now end) as run_at
        ) r
        cross join lateral (
            select u.more ->> 'concurrency_key' as concurrency_key, u.more -> 'hooks' as hooks,
                   (u.more ->> 'expires_in_s')::double precision as expires_in_s,
                   (u.more ->> 'retain_s')::double precision as retain_s, (u.more ->> 'concurrency_limit')::integer as concurrency_limit,
                   case when u.more ? 'unique_for_s' then 'period' else u.more ->> 'unique' end as unique_for,
                   coalesce(u.more ? 'concurrency_key' and u.more ? 'later', false) and coalesce(r.run_at <= t.now, true) as later
        ) m
        where (v_left is null or u.n = any (v_left)) and u.n <> all (coalesce(v_kept, '{}'))
        order by u.unique_key collate "C", u.n
        on conflict do nothing;
        exit when p_unique_keys is null;

        -- Who is not there under its own id must be there under its key, unless that job ended in between.
        select array_agg(u.place order by u.place), array_agg(o.id order by u.place) into v_left, v_owners
        from unnest(p_ids, p_unique_keys) with ordinality as u(id, unique_key, place)
        left join lateral (select j.id from {schema}.jobs j where j.active_key = u.unique_key) o on true
        where u.unique_key is not null and u.place <> all (coalesce(v_kept, '{}'))
              and not exists (select 1 from {schema}.jobs j where j.id = u.id);
        exit when v_left is null;
        if not (v_peculiar and {schema}.replace_owners(v_left, v_owners, p_ids, p_more))
           and array_position(v_owners, null) is null then
            return query select * from unnest(v_left, v_owners);
            exit;
        end if;
        if i = c_rounds then
            raise exception 'unique keys changed hands % times during one enqueue', c_rounds using errcode = '40001';
        end if;
    end loop;
    -- Last: who holds a line waits for nobody.
    if p_more is not null then
        perform {schema}.join_keys(p_more);
    end if;
    if v_outer and v_later then
        perform {schema}.postpone_gathered();
    elsif v_outer then
        perform {schema}.admit_gathered();
    end if;
end
$body$;

-- Return whether this is the first request with this key within `p_keep_s` seconds, and keep the key.
create or replace function {schema}.is_first(p_key bytea, p_fingerprint bytea, p_keep_s double precision) returns boolean
language plpgsql volatile
{fixed_path}
as $body$
declare
    -- Whoever comes clears away a few that are too old: so the table stays as small as what comes in.
    c_cleared constant integer := 20;
    v_before constant timestamptz := clock_timestamp() - make_interval(secs => p_keep_s);
begin
    delete from {schema}.requests r
    where r.key in (
        select o.key from {schema}.requests o where o.at < v_before order by o.at limit c_cleared for update skip locked);
    -- The second of two who come at once with the same key waits here until the first has committed.
    insert into {schema}.requests as r (key, fingerprint, job_ids, fresh)
    values (p_key, p_fingerprint, array[]::bigint[], array[]::boolean[])
    on conflict (key) do update set fingerprint = excluded.fingerprint, at = clock_timestamp() where r.at < v_before;
    return found;
end
$body$;

-- Enqueue unless it was done under this key within `p_keep_s`; either way give what is stored for the key.
--
-- In one transaction: jobs without their key would be stored again by the next try, a key without its jobs would lose
-- them.
create or replace function {schema}.enqueue_once_v1(
    p_key bytea, p_fingerprint bytea, p_keep_s double precision,
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns table (first boolean, fingerprint bytea, job_ids bigint[], fresh boolean[])
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_first constant boolean := {schema}.is_first(p_key, p_fingerprint, p_keep_s);
begin
    if v_first then
        update {schema}.requests r
        set (job_ids, fresh) = (
            select array_agg(coalesce(k.job_id, i.id) order by i.place), array_agg(k.job_id is null order by i.place)
            from unnest(p_ids) with ordinality as i(id, place)
            left join {schema}.enqueue_v1(
                p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more) k
                on k.place = i.place)
        where r.key = p_key;
    end if;
    return query select v_first, r.fingerprint, r.job_ids, r.fresh from {schema}.requests r where r.key = p_key;
end
$body$;
