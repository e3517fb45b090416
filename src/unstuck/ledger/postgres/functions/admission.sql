-- Concurrency keys (lines): how many jobs with the same key may be at work at once. Only `admit` makes a job of a line ready.

-- Let in who is next in these lines, as far as there are places; gives the queues in which jobs became ready.
--
-- Only this makes a job of a line ready, and it holds the line's row from before it counts until its commit: so there are
-- never more than may be. Each transaction that gives a place back, or adds a job, calls it afterwards: so no job waits
-- for a place that is free. A row that another session keeps, and a job that another session has
-- locked, are left to `admit_postponed`: the wait for them is bounded (`lock_keys`), and the place is not forgotten.
--
-- Within `gather_keys` they are only noted.
create or replace function {schema}.admit(p_keys text[]) returns text[]
language plpgsql volatile
{fixed_path}
as $body$
begin
    if {schema}.gathers_keys() then
        perform {schema}.note_keys((
            select jsonb_agg(jsonb_build_object('concurrency_key', l)) from unnest(p_keys) as l where l is not null));
        return '{}';
    end if;
    return {schema}.admit_now(p_keys, null);
end
$body$;

-- As `admit`, at once; `p_more` has what was said of the lines by those who joined them: the last word wins, but not over
-- an operator's.
create or replace function {schema}.admit_now(p_keys text[], p_more jsonb[]) returns text[]
language plpgsql volatile
{nested_loops}
as $body$
declare
    v_keys text[];
    v_locked text[];
    v_queues text[];
    v_roomy text[];
begin
    -- In their order, so that two who need the same lines cannot wait for each other.
    select array_agg(distinct l order by l) into v_keys from unnest(p_keys) as l where l is not null;
    if v_keys is null then
        return '{}';
    end if;
    v_locked := {schema}.lock_keys(v_keys);
    if cardinality(v_locked) < cardinality(v_keys) then
        perform {schema}.postpone_admissions(
            array(select l from unnest(v_keys) as l where l <> all (v_locked)), p_more, true);
        v_keys := v_locked;
        if cardinality(v_keys) = 0 then
            return '{}';
        end if;
    end if;
    if exists (select 1 from {schema}.postponed_admissions) then
        -- What was left for later is done below: whoever left it has committed.
        with taken as (
            delete from {schema}.postponed_admissions p where p.id in (
                select o.id from {schema}.postponed_admissions o where o.concurrency_key = any (v_keys) for update skip locked)
            returning p.id, p.concurrency_key, p.places
        ), said as (
            select distinct on (t.concurrency_key) t.concurrency_key, t.places from taken t where t.places is not null order by t.concurrency_key, t.id desc
        )
        update {schema}.concurrency_keys l set places = s.places, changed_at = clock_timestamp()
        from said s where l.key = s.concurrency_key and l.pinned_by is null and l.places <> s.places;
    end if;
    if p_more is not null then
        update {schema}.concurrency_keys l set places = u.places, changed_at = clock_timestamp()
        from (
            select distinct on (m.more ->> 'concurrency_key') m.more ->> 'concurrency_key' as concurrency_key, (m.more ->> 'concurrency_limit')::integer as places
            from unnest(p_more) with ordinality as m(more, n)
            where m.more ? 'concurrency_key' and m.more ? 'concurrency_limit' and not m.more ? 'later'
            order by m.more ->> 'concurrency_key', m.n desc
        ) u
        where l.key = u.concurrency_key and l.key = any (v_keys) and l.pinned_by is null and l.places <> u.places;
    end if;
    -- A statement of its own, with a snapshot taken after the locks were won.
    with room as materialized (
        select l.key, l.places - (
            select count(*) from {schema}.jobs j where j.concurrency_key = l.key and (j.ready or j.held)) as free
        from {schema}.concurrency_keys l where l.key = any (v_keys)
    ), next as materialized (
        select n.id
        from room r
        cross join lateral (
            select j.id from {schema}.jobs j where j.blocked and j.concurrency_key = r.key
            order by j.rank, j.id
            limit greatest(r.free, 0)
            for update skip locked
        ) n
        where r.free > 0
    ), admit_now as (
        update {schema}.jobs j set blocked = null, ready = true from next where j.id = next.id returning j.queue, j.concurrency_key
    )
    select (select array_agg(distinct i.queue) from admit_now i),
           (select array_agg(r.key) from room r where r.free > (select count(*) from admit_now i where i.concurrency_key = r.key))
    into v_queues, v_roomy;
    if v_roomy is not null then
        -- Another session has those in hand that could go in. Should it leave them as they are, nobody else would come.
        insert into {schema}.postponed_admissions (concurrency_key, held)
        select u.concurrency_key, false from unnest(v_roomy) as u(concurrency_key)
        where exists (select 1 from {schema}.jobs j where j.blocked and j.concurrency_key = u.concurrency_key);
    end if;
    return coalesce(v_queues, '{}');
end
$body$;

-- Jobs were enqueued: what they say of their lines counts from now on, the last word wins, and who may go in goes in.
create or replace function {schema}.join_keys(p_more jsonb[]) returns void
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_keys text[];
begin
    select array_agg(distinct m ->> 'concurrency_key') into v_keys from unnest(p_more) as m where m ? 'concurrency_key' and not m ? 'later';
    if v_keys is null then
        return;
    end if;
    if {schema}.gathers_keys() then
        perform {schema}.note_keys((
            select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('concurrency_key', u.more -> 'concurrency_key', 'concurrency_limit', u.more -> 'concurrency_limit'))
                             order by u.n)
            from unnest(p_more) with ordinality as u(more, n) where u.more ? 'concurrency_key' and not u.more ? 'later'));
    else
        perform {schema}.admit_now(v_keys, p_more);
    end if;
end
$body$;

-- Attempts at these jobs ended: their places are free. So are those in queues that have a limit.
create or replace function {schema}.leave_keys(p_ids bigint[]) returns text[]
language plpgsql volatile
{index_scans}
as $body$
declare
    v_keys text[];
    v_queues text[];
begin
    select array_agg(distinct j.concurrency_key) filter (where j.concurrency_key is not null),
           array_agg(distinct j.queue) filter (where k.concurrency is not null)
    into v_keys, v_queues
    from {schema}.jobs j left join {schema}.queues k on k.name = j.queue
    where j.id = any (p_ids);
    return coalesce(v_queues, '{}') || case when v_keys is null then '{}' else {schema}.admit(v_keys) end;
end
$body$;

-- Lock the rows of these concurrency keys, given in their order, and return those that were locked.
--
-- Other transactions of ours hold a row for moments and are waited for. A session that holds one for longer is not: its key
-- is left out. If another session found that before us (`postponed_admissions`), it is left out at once.
create or replace function {schema}.lock_keys(p_keys text[]) returns text[]
language plpgsql volatile
{index_scans}
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set lock_timeout = '200ms'
as $body$
declare
    v_locked bigint;
begin
    if cardinality(p_keys) = 1 then
        perform 1 from {schema}.concurrency_keys l where l.key = p_keys[1] for update skip locked;
        if found then
            return p_keys;
        end if;
    end if;
    if not exists (
        select 1 from {schema}.postponed_admissions p
        where p.concurrency_key = any (p_keys) and p.held) then
        -- A timeout gives back what was locked before it: so nobody waits for one key while holding another that is not
        -- next in the order.
        begin
            loop
                -- Counted is what was locked: a row may go and another come while one waits for it.
                select count(*) into v_locked from (
                    select 1 from {schema}.concurrency_keys l where l.key = any (p_keys) order by l.key for update) locked;
                exit when v_locked = cardinality(p_keys);
                perform {schema}.add_keys(p_keys);
            end loop;
            return p_keys;
        exception when lock_not_available then
            null;
        end;
    else
        begin
            perform {schema}.add_keys(p_keys);
        exception when lock_not_available then
            null;
        end;
    end if;
    return array(select l.key from {schema}.concurrency_keys l where l.key = any (p_keys) order by l.key for update skip locked);
end
$body$;

-- Create the rows of those of these concurrency keys that have none.
create or replace function {schema}.add_keys(p_keys text[]) returns void
language plpgsql volatile
{index_scans}
set enable_bitmapscan = off
as $body$
begin
    insert into {schema}.concurrency_keys (key, places)
    select u.concurrency_key, coalesce((select j.concurrency_limit from {schema}.jobs j
                             where j.blocked and j.concurrency_key = u.concurrency_key and j.concurrency_limit is not null
                             order by j.rank, j.id limit 1), 1)
    from unnest(p_keys) as u(concurrency_key)
    where not exists (select 1 from {schema}.concurrency_keys l where l.key = u.concurrency_key)
    order by u.concurrency_key
    on conflict do nothing;
end
$body$;

-- An operator chooses how many places a line has (NULL: as the jobs say again).
create or replace function {schema}.set_places_v1(p_key text, p_places integer, p_by text) returns text[]
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
begin
    insert into {schema}.concurrency_keys as l (key, places, pinned_by)
    values (p_key, coalesce(p_places, 1), case when p_places is not null then p_by end)
    on conflict (key) do update set
        places = coalesce(p_places, l.places), pinned_by = excluded.pinned_by, changed_at = clock_timestamp();
    insert into {schema}.events (kind, message)
    values ('line_limited', case when p_places is null then format('Line ''%s'' takes its limit from its jobs again (%s)', p_key, p_by)
                                 else format('Line ''%s'' has %s places now (%s)', p_key, p_places, p_by) end);
    return {schema}.admit(array[p_key]);
end
$body$;

-- Look after a stretch of the lines: admit jobs that wait at a free place, of which there should be none, and remove the
-- rows of lines that have no jobs. Gives where to go on (NULL: it was the end), and the queues in which jobs became ready.
create or replace function {schema}.check_keys_v1(
    p_after text, p_limit integer, out next_after text, out repaired integer, out removed integer, out queues text[])
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_keys text[];
    v_more text[];
    v_key text;
begin
    repaired := 0;
    removed := 0;
    queues := '{}';
    select array_agg(x.key order by x.key), case when count(*) = p_limit then max(x.key) end into v_keys, next_after
    from (select l.key from {schema}.concurrency_keys l where l.key > p_after order by l.key limit p_limit) x;
    -- Blocked jobs whose line has no row: a backup, or somebody's hand.
    with recursive found (concurrency_key) as (
        (select j.concurrency_key from {schema}.jobs j where j.blocked and j.concurrency_key > p_after order by j.concurrency_key limit 1)
        union all
        select (select j.concurrency_key from {schema}.jobs j where j.blocked and j.concurrency_key > f.concurrency_key order by j.concurrency_key limit 1)
        from found f where f.concurrency_key is not null
    )
    select v_keys || array_agg(f.concurrency_key) into v_keys
    from (select concurrency_key from found where concurrency_key is not null limit p_limit) f
    where f.concurrency_key <> all (coalesce(v_keys, '{}')) and (next_after is null or f.concurrency_key <= next_after);
    foreach v_key in array coalesce(v_keys, '{}') loop
        if exists (select 1 from {schema}.jobs j where j.blocked and j.concurrency_key = v_key)
           and (select count(*) from {schema}.jobs j where j.concurrency_key = v_key and (j.ready or j.held))
               < coalesce((select l.places from {schema}.concurrency_keys l where l.key = v_key), 1)
           -- What was left for later is no anomaly: `admit_postponed` comes for it.
           and not exists (select 1 from {schema}.postponed_admissions p where p.concurrency_key = v_key) then
            perform 1 from {schema}.concurrency_keys l where l.key = v_key for update skip locked;
            -- Whoever has it in hand admits the next job, or leaves that to `admit_postponed`.
            continue when not found and exists (select 1 from {schema}.concurrency_keys l where l.key = v_key);
            v_more := {schema}.admit(array[v_key]);
            -- Seen without a lock: whoever ends a job may have let the next one in meanwhile.
            if cardinality(v_more) > 0 then
                queues := queues || v_more;
                repaired := repaired + 1;
                insert into {schema}.events (kind, message)
                values ('line_repaired', format('Line ''%s'' had a free place that nobody was let in to; the next went in', v_key));
            end if;
        else
            perform 1 from {schema}.concurrency_keys l where l.key = v_key and l.pinned_by is null for update skip locked;
            continue when not found;
            -- A statement of its own again: who stood here when the lock was won still does.
            delete from {schema}.concurrency_keys l
            where l.key = v_key
              and not exists (select 1 from {schema}.jobs j where j.blocked and j.concurrency_key = l.key)
              and not exists (select 1 from {schema}.jobs j where j.concurrency_key = l.key and (j.ready or j.held));
            if found then
                removed := removed + 1;
            end if;
        end if;
    end loop;
end
$body$;
