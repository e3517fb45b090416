-- Claim around gaps: stretches of a queue in which this worker found nothing that it may take, and which it need not read
-- again with every claim. They are hints of the process that asks (see `store/gaps.py`). Nothing here trusts them for
-- longer than one turn, and without any the functions of `claim.sql` are used as they are.

-- How many entries of the ready index this transaction has read; those of dead rows count, as they cost the same.
create or replace function {schema}.ready_entries_read() returns bigint
language sql volatile
as $body$
    select pg_catalog.pg_stat_get_xact_tuples_returned('{schema}.jobs_ready'::pg_catalog.regclass)
$body$;

-- What is left of the queues around their gaps, in order; the bounds are outside. A gap begins with a rank, so that each
-- end of a stretch is a bound at which an index scan really stops: in a comparison of rows only the first column is.
create or replace function {schema}.stretches(p_queues text[], p_gaps jsonb)
returns table (queue text, after_rank integer, after_id bigint, before_rank bigint)
language plpgsql stable
{fixed_path}
set plan_cache_mode = force_generic_plan
set jit = off
as $body$
begin
    return query
    select q.name,
           case when part.n = 2 then g.to_rank else -2147483648 end,
           case when part.n = 2 then g.to_id else 0 end,
           case when part.n = 1 then coalesce(g.from_rank, 2147483648) else 2147483648 end
    from unnest(p_queues) with ordinality as q(name, place)
    left join jsonb_to_recordset(p_gaps) as g(queue text, from_rank bigint, to_rank integer, to_id bigint)
        on g.queue = q.name
    cross join (values (1), (2)) as part(n)
    where part.n = 1 or g.queue is not null
    order by q.place, part.n;
end
$body$;

-- As `lock_ready` and `lock_ready_of_many`, for one queue or several.
create or replace function {schema}.lock_ready_around(
    p_queues text[], p_tasks text[], p_limit integer, p_gaps jsonb, out ids bigint[], out payload_bytes bigint)
language plpgsql volatile
{nested_loops_in_order}
as $body$
declare
    v_names text[];
    v_after_ranks integer[];
    v_after_ids bigint[];
    v_before_ranks bigint[];
    v_quotas bigint[];
    v_seen bigint;
    v_more bigint[];
    v_more_bytes bigint;
begin
    select array_agg(s.queue), array_agg(s.after_rank), array_agg(s.after_id), array_agg(s.before_rank)
    into v_names, v_after_ranks, v_after_ids, v_before_ranks
    from {schema}.stretches(p_queues, p_gaps) s;

    if cardinality(p_queues) > 1 then
        -- Look without locks how many of the best belong to each stretch, then lock so many of each.
        select array_agg(coalesce(z.quota, 0) order by u.n), coalesce(sum(z.quota), 0) into v_quotas, v_seen
        from generate_subscripts(v_names, 1) as u(n)
        left join (
            select y.n, count(*) as quota
            from (
                select x.n
                from unnest(v_names, v_after_ranks, v_after_ids, v_before_ranks) with ordinality
                     as s(name, after_rank, after_id, before_rank, n)
                cross join lateral (
                    select s.n, j.rank, j.id from {schema}.jobs j
                    where j.ready and j.queue = s.name and coalesce(j.task = any (p_tasks), false)
                          and (j.rank, j.id) > (s.after_rank, s.after_id) and j.rank < s.before_rank
                    order by j.rank, j.id
                    limit p_limit
                ) x
                order by x.rank, x.id
                limit p_limit
            ) y
            group by y.n
        ) z on z.n = u.n;
        select array_agg(x.id order by x.rank, x.id), sum(x.size) into ids, payload_bytes
        from unnest(v_names, v_after_ranks, v_after_ids, v_before_ranks, v_quotas)
             as s(name, after_rank, after_id, before_rank, quota)
        cross join lateral (
            select j.id, j.rank, octet_length(j.payload)
                   + case when j.journal then {schema}.journal_bytes(j.id) else 0 end as size from {schema}.jobs j
            where j.ready and j.queue = s.name and coalesce(j.task = any (p_tasks), false)
                  and (j.rank, j.id) > (s.after_rank, s.after_id) and j.rank < s.before_rank
            order by j.rank, j.id
            limit s.quota
            for update skip locked
        ) x;
        if v_seen < p_limit then
            return;
        end if;
    end if;

    -- The stretches of one queue are in order. Of several, this is for what another claimer was faster to take: what is
    -- missing is taken from wherever there is more.
    for i in 1 .. coalesce(cardinality(v_names), 0) loop
        exit when cardinality(ids) >= p_limit;
        select array_agg(x.id), sum(x.size) into v_more, v_more_bytes from (
            select j.id, octet_length(j.payload)
                   + case when j.journal then {schema}.journal_bytes(j.id) else 0 end as size from {schema}.jobs j
            where j.ready and j.queue = v_names[i] and coalesce(j.task = any (p_tasks), false)
                  and (j.rank, j.id) > (v_after_ranks[i], v_after_ids[i]) and j.rank < v_before_ranks[i]
                  and (cardinality(p_queues) = 1 or j.id <> all (coalesce(ids, '{}')))
            order by j.rank, j.id
            limit p_limit - coalesce(cardinality(ids), 0)
            for update skip locked
        ) x;
        if v_more is not null then
            ids := ids || v_more;
            payload_bytes := coalesce(payload_bytes, 0) + v_more_bytes;
        end if;
    end loop;
end
$body$;

-- As `any_ready`.
create or replace function {schema}.any_ready_around(p_queues text[], p_tasks text[], p_gaps jsonb) returns boolean
language plpgsql stable
{nested_loops}
as $body$
begin
    return exists (
        select 1
        from {schema}.stretches(p_queues, p_gaps) s
        cross join lateral (
            select 1 from {schema}.jobs j
            where j.ready and j.queue = s.queue and coalesce(j.task = any (p_tasks), false)
                  and (j.rank, j.id) > (s.after_rank, s.after_id) and j.rank < s.before_rank
            order by j.rank, j.id
            limit 1
        ) x
    );
end
$body$;

-- Say which stretch of a queue holds nothing for these tasks, after a look that had to read past many; no row where there is
-- no long one. Called after what was found is taken: all before the first that is left, or where the look was not
-- cut short by its limit all that is there, is not for us, save what others had locked.
--
-- A few at both ends do not count: strays of other ranks must not make it longer, and at its end a margin stays outside,
-- where jobs are found at once whose transaction is slower than their id.
create or replace function {schema}.find_gap(p_queue text, p_tasks text[], p_taken bigint[], p_drained boolean)
returns table (from_rank integer, to_rank integer, to_id bigint)
language plpgsql volatile
{nested_loops_in_order}
as $body$
#variable_conflict use_column
declare
    c_margin constant integer := 500;
    c_many constant integer := 1000;
    v_from_rank integer;
    v_to_rank integer;
    v_to_id bigint;
    v_last_rank integer;
    v_last_id bigint;
    v_ours_rank integer;
    v_ours_id bigint;
    v_read bigint;
begin
    select j.rank, j.id into v_last_rank, v_last_id
    from unnest(p_taken) as u(id) join {schema}.jobs j on j.id = u.id
    where j.queue = p_queue
    order by j.rank desc, j.id desc
    limit 1;
    if not p_drained then
        select j.rank, j.id - c_margin into v_to_rank, v_to_id from {schema}.jobs j
        where j.ready and j.queue = p_queue and coalesce(j.task = any (p_tasks), false)
              and (j.rank, j.id) > (coalesce(v_last_rank, -2147483648), coalesce(v_last_id, 0))
        order by j.rank, j.id
        limit 1;
    end if;
    if v_to_id is null then
        -- Nothing is left for us.
        select j.rank, j.id into v_to_rank, v_to_id from {schema}.jobs j where j.ready and j.queue = p_queue
        order by j.rank desc, j.id desc
        offset c_margin limit 1;
    end if;
    if v_to_id is null then
        v_to_rank := v_last_rank;
        v_to_id := v_last_id - c_margin;
    end if;
    if v_to_id is null then
        return;
    end if;

    -- What another claimer has locked just now was passed over too, and may be given back the next moment: a queue of
    -- known tasks, where it stands at the head, must not get a gap by it. Behind a crowd it is not worth a second look.
    select x.rank, x.id into v_ours_rank, v_ours_id from (
        select j.rank, j.id, j.task from {schema}.jobs j where j.ready and j.queue = p_queue
        order by j.rank, j.id
        limit c_many + c_margin
    ) x
    where x.task = any (p_tasks)
    order by x.rank, x.id
    limit 1;
    if (v_ours_rank, v_ours_id) <= (v_to_rank, v_to_id) then
        v_to_rank := v_ours_rank;
        v_to_id := v_ours_id - c_margin;
    end if;

    v_read := {schema}.ready_entries_read();
    select j.rank into v_from_rank from {schema}.jobs j
    where j.ready and j.queue = p_queue and (j.rank, j.id) < (v_to_rank, v_to_id)
    order by j.rank, j.id
    offset c_margin limit 1;
    if not found then
        -- Few rows, but perhaps many entries: dead ones that an old snapshot keeps from being cleared away.
        if {schema}.ready_entries_read() - v_read < c_many then
            return;
        end if;
        v_read := {schema}.ready_entries_read();
        perform 1 from {schema}.jobs j where j.ready and j.queue = p_queue and j.rank < v_to_rank
        order by j.rank, j.id
        offset c_margin limit 1;
        v_from_rank := case when {schema}.ready_entries_read() - v_read < c_many then v_to_rank else -2147483648 end;
    end if;
    return query select v_from_rank, v_to_rank, v_to_id;
end
$body$;
