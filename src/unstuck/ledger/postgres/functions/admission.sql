-- Concurrency keys (lines): how many jobs with the same key may be at work at once. Only `admit` makes a job of a line ready.

-- Let in who is next in these lines, as far as there are places; gives the queues in which jobs became ready.
--
-- Only this makes a job of a line ready, and it holds the line's row from before it counts until its commit: so there are
-- never more than may be. Each transaction that gives a place back, or adds a job, calls it afterwards: so no job waits
-- for a place that is free. A row that another session keeps, and a job that another session has
-- locked, are left to `admit_postponed`: the wait for them is bounded (`lock_lines`), and the place is not forgotten.
--
-- Within `gather_lines` they are only noted.
create or replace function {schema}.admit(p_lines text[]) returns text[]
language plpgsql volatile
{fixed_path}
as $body$
begin
    if {schema}.gathers_lines() then
        perform {schema}.note_lines((
            select jsonb_agg(jsonb_build_object('line', l)) from unnest(p_lines) as l where l is not null));
        return '{}';
    end if;
    return {schema}.let_in(p_lines, null);
end
$body$;

-- As `admit`, at once; `p_more` has what was said of the lines by those who joined them: the last word wins, but not over
-- an operator's.
create or replace function {schema}.let_in(p_lines text[], p_more jsonb[]) returns text[]
language plpgsql volatile
{nested_loops}
as $body$
declare
    v_lines text[];
    v_locked text[];
    v_queues text[];
    v_roomy text[];
begin
    -- In their order, so that two who need the same lines cannot wait for each other.
    select array_agg(distinct l order by l) into v_lines from unnest(p_lines) as l where l is not null;
    if v_lines is null then
        return '{}';
    end if;
    v_locked := {schema}.lock_lines(v_lines);
    if cardinality(v_locked) < cardinality(v_lines) then
        perform {schema}.postpone_admissions(
            array(select l from unnest(v_lines) as l where l <> all (v_locked)), p_more, true);
        v_lines := v_locked;
        if cardinality(v_lines) = 0 then
            return '{}';
        end if;
    end if;
    if exists (select 1 from {schema}.postponed_admissions) then
        -- What was left for later is done below: whoever left it has committed.
        with taken as (
            delete from {schema}.postponed_admissions p where p.id in (
                select o.id from {schema}.postponed_admissions o where o.line = any (v_lines) for update skip locked)
            returning p.id, p.line, p.places
        ), said as (
            select distinct on (t.line) t.line, t.places from taken t where t.places is not null order by t.line, t.id desc
        )
        update {schema}.lines l set places = s.places, changed_at = clock_timestamp()
        from said s where l.key = s.line and l.pinned_by is null and l.places <> s.places;
    end if;
    if p_more is not null then
        update {schema}.lines l set places = u.places, changed_at = clock_timestamp()
        from (
            select distinct on (m.more ->> 'line') m.more ->> 'line' as line, (m.more ->> 'line_limit')::integer as places
            from unnest(p_more) with ordinality as m(more, n)
            where m.more ? 'line' and m.more ? 'line_limit' and not m.more ? 'later'
            order by m.more ->> 'line', m.n desc
        ) u
        where l.key = u.line and l.key = any (v_lines) and l.pinned_by is null and l.places <> u.places;
    end if;
    -- A statement of its own, with a snapshot taken after the locks were won.
    with room as materialized (
        select l.key, l.places - (
            select count(*) from {schema}.jobs j where j.line = l.key and (j.ready or j.held)) as free
        from {schema}.lines l where l.key = any (v_lines)
    ), next as materialized (
        select n.id
        from room r
        cross join lateral (
            select j.id from {schema}.jobs j where j.blocked and j.line = r.key
            order by j.rank, j.id
            limit greatest(r.free, 0)
            for update skip locked
        ) n
        where r.free > 0
    ), let_in as (
        update {schema}.jobs j set blocked = null, ready = true from next where j.id = next.id returning j.queue, j.line
    )
    select (select array_agg(distinct i.queue) from let_in i),
           (select array_agg(r.key) from room r where r.free > (select count(*) from let_in i where i.line = r.key))
    into v_queues, v_roomy;
    if v_roomy is not null then
        -- Another session has those in hand that could go in. Should it leave them as they are, nobody else would come.
        insert into {schema}.postponed_admissions (line, held)
        select u.line, false from unnest(v_roomy) as u(line)
        where exists (select 1 from {schema}.jobs j where j.blocked and j.line = u.line);
    end if;
    return coalesce(v_queues, '{}');
end
$body$;

-- Jobs were enqueued: what they say of their lines counts from now on, the last word wins, and who may go in goes in.
create or replace function {schema}.line_up(p_more jsonb[]) returns void
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_lines text[];
begin
    select array_agg(distinct m ->> 'line') into v_lines from unnest(p_more) as m where m ? 'line' and not m ? 'later';
    if v_lines is null then
        return;
    end if;
    if {schema}.gathers_lines() then
        perform {schema}.note_lines((
            select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('line', u.more -> 'line', 'line_limit', u.more -> 'line_limit'))
                             order by u.n)
            from unnest(p_more) with ordinality as u(more, n) where u.more ? 'line' and not u.more ? 'later'));
    else
        perform {schema}.let_in(v_lines, p_more);
    end if;
end
$body$;

-- Attempts at these jobs ended: their places are free. So are those in queues that have a limit.
create or replace function {schema}.leave_lines(p_ids bigint[]) returns text[]
language plpgsql volatile
{index_scans}
as $body$
declare
    v_lines text[];
    v_queues text[];
begin
    select array_agg(distinct j.line) filter (where j.line is not null),
           array_agg(distinct j.queue) filter (where k.concurrency is not null)
    into v_lines, v_queues
    from {schema}.jobs j left join {schema}.queues k on k.name = j.queue
    where j.id = any (p_ids);
    return coalesce(v_queues, '{}') || case when v_lines is null then '{}' else {schema}.admit(v_lines) end;
end
$body$;

-- Lock the rows of these concurrency keys, given in their order, and return those that were locked.
--
-- Other transactions of ours hold a row for moments and are waited for. A session that holds one for longer is not: its key
-- is left out. If another session found that before us (`postponed_admissions`), it is left out at once.
create or replace function {schema}.lock_lines(p_lines text[]) returns text[]
language plpgsql volatile
{index_scans}
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set lock_timeout = '200ms'
as $body$
declare
    v_locked bigint;
begin
    if cardinality(p_lines) = 1 then
        perform 1 from {schema}.lines l where l.key = p_lines[1] for update skip locked;
        if found then
            return p_lines;
        end if;
    end if;
    if not exists (
        select 1 from {schema}.postponed_admissions p
        where p.line = any (p_lines) and p.held) then
        -- A timeout gives back what was locked before it: so nobody waits for one key while holding another that is not
        -- next in the order.
        begin
            loop
                -- Counted is what was locked: a row may go and another come while one waits for it.
                select count(*) into v_locked from (
                    select 1 from {schema}.lines l where l.key = any (p_lines) order by l.key for update) locked;
                exit when v_locked = cardinality(p_lines);
                perform {schema}.add_lines(p_lines);
            end loop;
            return p_lines;
        exception when lock_not_available then
            null;
        end;
    else
        begin
            perform {schema}.add_lines(p_lines);
        exception when lock_not_available then
            null;
        end;
    end if;
    return array(select l.key from {schema}.lines l where l.key = any (p_lines) order by l.key for update skip locked);
end
$body$;

-- Create the rows of those of these concurrency keys that have none.
create or replace function {schema}.add_lines(p_lines text[]) returns void
language plpgsql volatile
{index_scans}
set enable_bitmapscan = off
as $body$
begin
    insert into {schema}.lines (key, places)
    select u.line, coalesce((select j.line_limit from {schema}.jobs j
                             where j.blocked and j.line = u.line and j.line_limit is not null
                             order by j.rank, j.id limit 1), 1)
    from unnest(p_lines) as u(line)
    where not exists (select 1 from {schema}.lines l where l.key = u.line)
    order by u.line
    on conflict do nothing;
end
$body$;

-- An operator chooses how many places a line has (NULL: as the jobs say again).
create or replace function {schema}.set_places_v1(p_line text, p_places integer, p_by text) returns text[]
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
begin
    insert into {schema}.lines as l (key, places, pinned_by)
    values (p_line, coalesce(p_places, 1), case when p_places is not null then p_by end)
    on conflict (key) do update set
        places = coalesce(p_places, l.places), pinned_by = excluded.pinned_by, changed_at = clock_timestamp();
    insert into {schema}.events (kind, message)
    values ('line_limited', case when p_places is null then format('Line ''%s'' takes its limit from its jobs again (%s)', p_line, p_by)
                                 else format('Line ''%s'' has %s places now (%s)', p_line, p_places, p_by) end);
    return {schema}.admit(array[p_line]);
end
$body$;

-- Look after a stretch of the lines: admit jobs that wait at a free place, of which there should be none, and remove the
-- rows of lines that have no jobs. Gives where to go on (NULL: it was the end), and the queues in which jobs became ready.
create or replace function {schema}.tend_lines_v1(
    p_after text, p_limit integer, out next_after text, out repaired integer, out removed integer, out queues text[])
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_lines text[];
    v_more text[];
    v_line text;
begin
    repaired := 0;
    removed := 0;
    queues := '{}';
    select array_agg(x.key order by x.key), case when count(*) = p_limit then max(x.key) end into v_lines, next_after
    from (select l.key from {schema}.lines l where l.key > p_after order by l.key limit p_limit) x;
    -- Blocked jobs whose line has no row: a backup, or somebody's hand.
    with recursive found (line) as (
        (select j.line from {schema}.jobs j where j.blocked and j.line > p_after order by j.line limit 1)
        union all
        select (select j.line from {schema}.jobs j where j.blocked and j.line > f.line order by j.line limit 1)
        from found f where f.line is not null
    )
    select v_lines || array_agg(f.line) into v_lines
    from (select line from found where line is not null limit p_limit) f
    where f.line <> all (coalesce(v_lines, '{}')) and (next_after is null or f.line <= next_after);
    foreach v_line in array coalesce(v_lines, '{}') loop
        if exists (select 1 from {schema}.jobs j where j.blocked and j.line = v_line)
           and (select count(*) from {schema}.jobs j where j.line = v_line and (j.ready or j.held))
               < coalesce((select l.places from {schema}.lines l where l.key = v_line), 1)
           -- What was left for later is no anomaly: `admit_postponed` comes for it.
           and not exists (select 1 from {schema}.postponed_admissions p where p.line = v_line) then
            perform 1 from {schema}.lines l where l.key = v_line for update skip locked;
            -- Whoever has it in hand admits the next job, or leaves that to `admit_postponed`.
            continue when not found and exists (select 1 from {schema}.lines l where l.key = v_line);
            v_more := {schema}.admit(array[v_line]);
            -- Seen without a lock: whoever ends a job may have let the next one in meanwhile.
            if cardinality(v_more) > 0 then
                queues := queues || v_more;
                repaired := repaired + 1;
                insert into {schema}.events (kind, message)
                values ('line_repaired', format('Line ''%s'' had a free place that nobody was let in to; the next went in', v_line));
            end if;
        else
            perform 1 from {schema}.lines l where l.key = v_line and l.pinned_by is null for update skip locked;
            continue when not found;
            -- A statement of its own again: who stood here when the lock was won still does.
            delete from {schema}.lines l
            where l.key = v_line
              and not exists (select 1 from {schema}.jobs j where j.blocked and j.line = l.key)
              and not exists (select 1 from {schema}.jobs j where j.line = l.key and (j.ready or j.held));
            if found then
                removed := removed + 1;
            end if;
        end if;
    end loop;
end
$body$;
