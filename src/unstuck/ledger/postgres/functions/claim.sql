-- Find and lock what is ready, in the order of rank and id, without ever waiting for another claimer.
--
-- The planner is kept to the index (queue, rank, id) where ready: it is in order already, so a claim reads as many
-- entries as it takes, however many jobs wait or are finished.

-- Returned with the ids is their size: payloads, and the journals of those that have one. What does not fit into an
-- answer is left out of it.
create or replace function {schema}.lock_ready(
    p_queue text, p_tasks text[], p_limit integer, out ids bigint[], out payload_bytes bigint)
language plpgsql volatile
{plain_index_scans}
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
as $body$
begin
    select array_agg(x.id), sum(x.size) into ids, payload_bytes from (
        select j.id, octet_length(j.payload)
                   + case when j.journal then {schema}.journal_bytes(j.id) else 0 end as size from {schema}.jobs j
        where j.ready and j.queue = p_queue and coalesce(j.task = any (p_tasks), false)
        order by j.rank, j.id
        limit p_limit
        for update skip locked
    ) x;
end
$body$;

-- Several queues: look without locks how many of the best belong to each queue, then lock that many of each.
create or replace function {schema}.lock_ready_of_many(
    p_queues text[], p_tasks text[], p_limit integer, out ids bigint[], out payload_bytes bigint)
language plpgsql volatile
{nested_loops_in_order}
as $body$
declare
    v_names text[];
    v_quotas bigint[];
    v_seen bigint;
    v_queue text;
    v_more bigint[];
    v_more_bytes bigint;
begin
    select array_agg(z.queue), array_agg(z.quota), sum(z.quota) into v_names, v_quotas, v_seen
    from (
        select y.queue, count(*) as quota
        from (
            select x.queue
            from unnest(p_queues) as q(name)
            cross join lateral (
                select j.queue, j.rank, j.id from {schema}.jobs j
                where j.ready and j.queue = q.name and coalesce(j.task = any (p_tasks), false)
                order by j.rank, j.id
                limit p_limit
            ) x
            order by x.rank, x.id
            limit p_limit
        ) y
        group by y.queue
    ) z;
    if v_names is null then
        return;
    end if;
    select array_agg(x.id order by x.rank, x.id), sum(x.size) into ids, payload_bytes
    from unnest(v_names, v_quotas) as q(name, quota)
    cross join lateral (
        select j.id, j.rank, octet_length(j.payload)
                   + case when j.journal then {schema}.journal_bytes(j.id) else 0 end as size from {schema}.jobs j
        where j.ready and j.queue = q.name and coalesce(j.task = any (p_tasks), false)
        order by j.rank, j.id
        limit q.quota
        for update skip locked
    ) x;
    -- Another claimer was faster in one queue: what is missing is taken from wherever there is more.
    if v_seen >= p_limit and coalesce(cardinality(ids), 0) < p_limit then
        foreach v_queue in array p_queues loop
            select array_agg(x.id), sum(x.size) into v_more, v_more_bytes from (
                select j.id, octet_length(j.payload)
                   + case when j.journal then {schema}.journal_bytes(j.id) else 0 end as size from {schema}.jobs j
                where j.ready and j.queue = v_queue and coalesce(j.task = any (p_tasks), false)
                      and j.id <> all (coalesce(ids, '{}'))
                order by j.rank, j.id
                limit p_limit - coalesce(cardinality(ids), 0)
                for update skip locked
            ) x;
            ids := ids || v_more;
            payload_bytes := coalesce(payload_bytes, 0) + coalesce(v_more_bytes, 0);
            exit when cardinality(ids) >= p_limit;
        end loop;
    end if;
end
$body$;

-- Whether there is anything to claim at all; reads only.
create or replace function {schema}.any_ready(p_queues text[], p_tasks text[]) returns boolean
language plpgsql stable
{nested_loops}
as $body$
begin
    return exists (
        select 1
        from unnest(p_queues) as q(name)
        cross join lateral (
            select 1 from {schema}.jobs j
            where j.ready and j.queue = q.name and coalesce(j.task = any (p_tasks), false)
            order by j.rank, j.id
            limit 1
        ) x
    );
end
$body$;

-- When the next scheduled job of these queues is due, or soon if an admission was left for later. It looks at the first few of
-- the ledger only: not to know costs a poll, to search a million jobs of other queues would cost more.
create or replace function {schema}.next_due_in_s(p_queues text[]) returns double precision
language plpgsql stable
{plain_index_scans}
set plan_cache_mode = force_generic_plan
set enable_sort = off
as $body$
begin
    return least((
        select greatest(0, extract(epoch from x.run_at - clock_timestamp()))
        from (select j.run_at, j.queue from {schema}.jobs j where j.scheduled order by j.run_at limit 200) x
        where x.queue = any (p_queues)
        limit 1), {schema}.postponed_in_s_v1());
end
$body$;

-- Return the jobs, in their order, that are at most `p_bytes` together, with their journals; the first in any case. What
-- is handed out at once is in the memory of the server and of the worker at once.
create or replace function {schema}.first_within_bytes(p_ids bigint[], p_bytes bigint) returns bigint[]
language sql stable
{fixed_path}
as $body$
    select array_agg(x.id order by x.n) from (
        select u.id, u.n, sum(
            octet_length(j.payload) + case when j.journal then {schema}.journal_bytes(j.id) else 0 end
        ) over (order by u.n) as up_to_here
        from unnest(p_ids) with ordinality as u(id, n)
        join {schema}.jobs j on j.id = u.id
    ) x
    where x.n = 1 or x.up_to_here <= p_bytes
$body$;

-- Return the size of what a job wrote down and of the signals that wait for it: the next attempt is given all of it. The
-- values themselves are not read.
create or replace function {schema}.journal_bytes(p_job bigint) returns integer
language plpgsql stable
{plain_index_scans}
as $body$
begin
    return coalesce((select sum(octet_length(k.value)) from {schema}.journal k where k.job_id = p_job), 0)
        + coalesce((
            select sum(octet_length(s.value)) from {schema}.signals s where s.job_id = p_job and s.taken_seq is null), 0);
end
$body$;
