-- What keeps order in queues: lines (how many jobs with the same concurrency key may be at work at once), limits of whole
-- queues, keys that are unique in other ways, expiry, the guard against starvation, and how long an ended job is kept.

-- Changes nothing but locks the view, before its table: in the order of those who read it (see 0010).
alter view {schema}.held_jobs reset (security_barrier);

alter table {schema}.jobs
    add column line_limit integer,
    -- What its unique key is good for: 'pending' until it is claimed, 'period' for a time (in `kept_keys`), NULL until it ends.
    add column unique_for text;

alter table {schema}.jobs drop constraint key_lives_with_the_job;
alter table {schema}.jobs add constraint key_lives_with_the_job check (
    unique_key is null or case unique_for
        when 'pending' then live_key is null or live_key = unique_key and finished_at is null
        when 'period' then live_key is null
        else live_key is not distinct from case when finished_at is null then unique_key end end) not valid;

-- Who has a place in a line: let in, and not at the end of an attempt yet. That is the count; there is no other.
create index jobs_in_line on {schema}.jobs (line) where line is not null and (ready or held);
create index jobs_expiring on {schema}.jobs (expires_at)
    where expires_at is not null and (ready or waiting or blocked);
create index jobs_kept on {schema}.jobs (keep_s, finished_at) where keep_s is not null and finished_at is not null;

-- Lines -------------------------------------------------------------------------------------

-- One row per line that is in use: who wants to let somebody in locks it first.
create table {schema}.lines (
    key        text primary key,
    places     integer not null default 1 check (places >= 1),
    -- An operator chose the number; what is enqueued later does not change it.
    pinned_by  text,
    changed_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Concurrency keys whose next job is to be admitted later: another session holds the row of the key or the next job, or the
-- transaction that gave a place back is a user's and stays open. Rows are only inserted and deleted, so nobody waits here.
create table {schema}.postponed_admissions (
    id     bigint generated always as identity primary key,
    line   text not null,
    -- The limit that somebody who joined wanted, if any.
    places integer,
    -- Another session held the row of the key for longer than we wait.
    held   boolean not null,
    at     timestamptz not null default clock_timestamp()
);
create index postponed_admissions_line on {schema}.postponed_admissions (line, id);

-- Let in who is next in these lines, as far as there are places; gives the queues in which jobs became ready.
--
-- Only this makes a job of a line ready, and it holds the line's row from before it counts until its commit: so there are
-- never more than may be. Whoever gives a place back calls it afterwards in the same transaction, and whoever adds a
-- job too: so nobody waits for a place that is free. A row that another session keeps, and a job that another session has
-- locked, are left to `admit_postponed`: the wait for them is bounded (`lock_lines`), and the place is not forgotten.
--
-- Within `gather_lines` they are only noted.
create function {schema}.admit(p_lines text[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
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

-- Whoever goes on through a workflow frees places in some lines and needs places in others, step by step; two who took
-- lines as they came to them would wait for each other. So they are noted from here on, for the rest of the transaction,
-- and locked in their order by `let_in_gathered`. Says whether it was this call that began it: that one ends it too.
create function {schema}.gather_lines() returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    if {schema}.gathers_lines() then
        return false;
    end if;
    perform set_config('unstuck.lines', '[]', true);
    return true;
end
$body$;

create function {schema}.gathers_lines() returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $body$
begin
    return coalesce(current_setting('unstuck.lines', true), '') <> '';
end
$body$;

create function {schema}.note_lines(p_lines jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    if p_lines is not null then
        perform set_config('unstuck.lines', (current_setting('unstuck.lines')::jsonb || p_lines)::text, true);
    end if;
end
$body$;

create function {schema}.let_in_gathered() returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_noted constant text := current_setting('unstuck.lines');
    v_more jsonb[];
begin
    perform set_config('unstuck.lines', '', true);
    if v_noted = '[]' then
        return '{}';
    end if;
    v_more := array(select e.value from jsonb_array_elements(v_noted::jsonb) with ordinality as e(value, n) order by e.n);
    return {schema}.let_in(array(select m ->> 'line' from unnest(v_more) as m), v_more);
end
$body$;

-- Several turns, and what came in beside them, are one transaction: it takes the locks of all of them at once and in their
-- order, as one turn does (`lock_workflows`), and lines when it is done (`end_exchange`).
create function {schema}.begin_exchange_v1(p_workers text[], p_ids bigint[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set lock_timeout = '400ms'
as $body$
declare
    v_flows constant boolean := exists (select 1 from {schema}.workflows);
    v_lines constant boolean := exists (select 1 from {schema}.lines);
begin
    if v_flows or v_lines then
        perform 1 from {schema}.workers w where w.id = any (p_workers) order by w.id for share;
    end if;
    if v_flows then
        perform {schema}.lock_workflows(p_ids);
    end if;
    perform {schema}.gather_lines();
end
$body$;

-- Gives the queues in which jobs became ready.
create function {schema}.end_exchange_v1() returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return {schema}.let_in_gathered();
end
$body$;

-- Lock the rows of these concurrency keys, given in their order, and return those that were locked.
--
-- Other transactions of ours hold a row for moments and are waited for. A session that holds one for longer is not: its key
-- is left out. Where somebody found that before us (`postponed_admissions`), it is left out at once.
create function {schema}.lock_lines(p_lines text[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
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
create function {schema}.add_lines(p_lines text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
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

-- Leave the admission at these concurrency keys to `admit_postponed`, with the limits that those who joined wanted.
create function {schema}.postpone_admissions(p_lines text[], p_more jsonb[], p_held boolean) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    insert into {schema}.postponed_admissions (line, places, held)
    select u.line, (
        select (m.more ->> 'line_limit')::integer from unnest(p_more) with ordinality as m(more, n)
        where m.more ->> 'line' = u.line and m.more ? 'line_limit' and not m.more ? 'later'
        order by m.n desc limit 1), p_held
    from unnest(p_lines) as u(line) where u.line is not null
    group by u.line;
end
$body$;

-- As `let_in_gathered`, for a transaction that may stay open: it takes no lock that workers need.
create function {schema}.postpone_gathered() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_more constant jsonb[] := array(
        select e.value from jsonb_array_elements(current_setting('unstuck.lines')::jsonb) with ordinality as e(value, n)
        order by e.n);
begin
    perform set_config('unstuck.lines', '', true);
    perform {schema}.postpone_admissions(array(select m ->> 'line' from unnest(v_more) as m), v_more, false);
end
$body$;

-- Do the admissions that were left for later, as far as nobody holds those keys now; waits for nobody. Gives the queues in
-- which jobs became ready.
create function {schema}.admit_postponed(p_limit integer) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $body$
declare
    v_lines text[];
    v_free text[];
begin
    -- From key to key in the index: a key that somebody holds may have thousands of notes, and hides no other.
    with recursive found (line) as (
        (select p.line from {schema}.postponed_admissions p order by p.line limit 1)
        union all
        select (select p.line from {schema}.postponed_admissions p where p.line > f.line order by p.line limit 1)
        from found f where f.line is not null
    )
    select array_agg(x.line) into v_lines from (select f.line from found f where f.line is not null limit p_limit) x;
    if v_lines is null then
        return '{}';
    end if;
    v_free := array(select l.key from {schema}.lines l where l.key = any (v_lines) order by l.key for update skip locked);
    return {schema}.let_in(
        v_free || array(select u.line from unnest(v_lines) as u(line)
                        where not exists (select 1 from {schema}.lines l where l.key = u.line)), null);
end
$body$;

-- How soon it is worth another try to do what was left for later; NULL: nothing was.
create function {schema}.postponed_in_s_v1() returns double precision
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
    select case when p.at > clock_timestamp() - interval '2 seconds' then 0.2 else 1.0 end
    from {schema}.postponed_admissions p order by p.id desc limit 1
$body$;

-- As in 0003, and soon if an admission was left for later.
create or replace function {schema}.next_due_in_s(p_queues text[]) returns double precision
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $body$
begin
    return least((
        select greatest(0, extract(epoch from x.run_at - clock_timestamp()))
        from (select j.run_at, j.queue from {schema}.jobs j where j.waiting order by j.run_at limit 200) x
        where x.queue = any (p_queues)
        limit 1), {schema}.postponed_in_s_v1());
end
$body$;

-- As `admit`, at once; `p_more` has what was said of the lines by those who joined them: the last word wins, but not over
-- an operator's.
create function {schema}.let_in(p_lines text[], p_more jsonb[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
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
create function {schema}.line_up(p_more jsonb[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
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
create function {schema}.leave_lines(p_ids bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
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

-- An operator chooses how many places a line has (NULL: as the jobs say again).
create function {schema}.set_places_v1(p_line text, p_places integer, p_by text) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
begin
    insert into {schema}.lines as l (key, places, pinned_by)
    values (p_line, coalesce(p_places, 1), case when p_places is not null then p_by end)
    on conflict (key) do update set
        places = coalesce(p_places, l.places), pinned_by = excluded.pinned_by, changed_at = clock_timestamp();
    insert into {schema}.events (kind, message)
    values ('line_limited', case when p_places is null then format('Line %L takes its limit from its jobs again (%s)', p_line, p_by)
                                 else format('Line %L has %s places now (%s)', p_line, p_places, p_by) end);
    return {schema}.admit(array[p_line]);
end
$body$;

-- Look after a stretch of the lines: let in who waits at a free place, which should be nobody, and remove the rows of
-- lines in which nobody stands. Gives where to go on (NULL: it was the end), and the queues in which jobs became ready.
create function {schema}.tend_lines_v1(
    p_after text, p_limit integer, out next_after text, out repaired integer, out removed integer, out queues text[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
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
                values ('line_repaired', format('Line %L had a free place that nobody was let in to; the next went in', v_line));
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

-- Limits of queues ----------------------------------------------------------------------------

alter table {schema}.queues
    -- How many of its jobs may be in hand at once.
    add column concurrency integer check (concurrency >= 1),
    -- How many may be begun in a window of time: a bucket of so many tokens, which fills again in that time.
    add column rate double precision check (rate >= 1),
    add column rate_window_s double precision check (rate_window_s > 0),
    add column tokens double precision,
    add column refilled_at timestamptz,
    -- The operator who chose them; NULL: an app did, or nobody.
    add column limited_by text,
    add constraint whole_rate check ((rate is null) = (rate_window_s is null));

-- How many more jobs of a queue may be taken now, and where its rate is why not, when there will be one.
create function {schema}.room_of_v1(p_queue text, out room bigint, out in_s double precision)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_queue record;
    v_tokens double precision;
begin
    select k.concurrency, k.rate, k.rate_window_s, k.tokens, k.refilled_at into v_queue
    from {schema}.queues k where k.name = p_queue;
    room := 2147483647;
    if v_queue.concurrency is not null then
        room := greatest(0, v_queue.concurrency - (select count(*) from {schema}.jobs j where j.held and j.queue = p_queue));
    end if;
    if v_queue.rate is not null then
        v_tokens := least(v_queue.rate, coalesce(
            v_queue.tokens + greatest(0, date_part('epoch', clock_timestamp() - v_queue.refilled_at))
                * v_queue.rate / v_queue.rate_window_s, v_queue.rate));
        if v_tokens < 1 and room > 0 then
            in_s := (1 - v_tokens) * v_queue.rate_window_s / v_queue.rate;
        end if;
        room := least(room, floor(v_tokens)::bigint);
    end if;
end
$body$;

-- Whether the bucket of a queue was last filled in the future: the clock was set back. The next turn that may write sets the
-- bucket's time to now. Time before the step counts as none, or the queue would stand still until the clock catches up.
create function {schema}.filled_in_future(p_queue text) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
    select exists (
        select 1 from {schema}.queues k where k.name = p_queue and k.rate is not null and k.refilled_at > clock_timestamp())
$body$;

create function {schema}.any_ready_within(p_queues text[], p_tasks text[]) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_queue text;
begin
    foreach v_queue in array p_queues loop
        if {schema}.any_ready(array[v_queue], p_tasks)
           and ((select r.room from {schema}.room_of_v1(v_queue) r) > 0 or {schema}.filled_in_future(v_queue)) then
            return true;
        end if;
    end loop;
    return false;
end
$body$;

-- When one of these queues, which has something ready, may give it by its rate; NULL where it is not time that is missing.
create function {schema}.room_in_s(p_queues text[], p_tasks text[]) returns double precision
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $body$
begin
    return (
        select min(r.in_s) from unnest(p_queues) as q(name) cross join lateral {schema}.room_of_v1(q.name) r
        where r.in_s is not null and {schema}.any_ready(array[q.name], p_tasks));
end
$body$;

-- Lock the row of a queue, and return whether that was possible: a session that holds it for longer than other claims do is
-- not waited for.
create function {schema}.lock_queue(p_queue text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set lock_timeout = '200ms'
as $body$
begin
    perform 1 from {schema}.queues k where k.name = p_queue for update skip locked;
    if found then
        return true;
    end if;
    begin
        perform 1 from {schema}.queues k where k.name = p_queue for update;
        return true;
    exception when lock_not_available then
        return false;
    end;
end
$body$;

-- As `lock_ready`, from queues that have a limit, each under the lock of its row: who counts what is held there counts
-- what the last one took. `p_ids` was found in other queues; given back are the best of both.
create function {schema}.lock_ready_within(
    p_queues text[], p_tasks text[], p_limit integer, p_ids bigint[], out ids bigint[], out payload_bytes bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_queue text;
    v_room bigint;
    v_ids bigint[];
    v_bytes bigint;
    v_limited text[] := '{}';
begin
    ids := p_ids;
    payload_bytes := 0;
    foreach v_queue in array p_queues loop
        -- Without a lock first: who finds nothing must not wait for those who do.
        continue when not {schema}.any_ready(array[v_queue], p_tasks)
            or (select r.room from {schema}.room_of_v1(v_queue) r) <= 0 and not {schema}.filled_in_future(v_queue);
        continue when not {schema}.lock_queue(v_queue);
        update {schema}.queues k set refilled_at = clock_timestamp()
        where k.name = v_queue and k.rate is not null and k.refilled_at > clock_timestamp();
        select r.room into v_room from {schema}.room_of_v1(v_queue) r;
        continue when v_room <= 0;
        select r.ids, r.payload_bytes into v_ids, v_bytes
        from {schema}.lock_ready(v_queue, p_tasks, least(v_room, p_limit)::integer) r;
        continue when v_ids is null;
        ids := ids || v_ids;
        payload_bytes := payload_bytes + coalesce(v_bytes, 0);
        v_limited := v_limited || v_queue;
    end loop;
    if cardinality(v_limited) = 0 then
        return;
    end if;
    select array_agg(x.id order by x.rank, x.id) into ids from (
        select j.id, j.rank from {schema}.jobs j where j.id = any (ids) order by j.rank, j.id limit p_limit) x;
    update {schema}.queues k set
        tokens = least(k.rate, coalesce(
            k.tokens + greatest(0, date_part('epoch', clock_timestamp() - k.refilled_at)) * k.rate / k.rate_window_s, k.rate))
            - (select count(*) from {schema}.jobs j where j.id = any (ids) and j.queue = k.name),
        refilled_at = clock_timestamp()
    where k.name = any (v_limited) and k.rate is not null;
end
$body$;

-- Unique keys in other ways -----------------------------------------------------------------------

-- Keys that are good for a period from their enqueue, however their job ended. A key stays when retention removes its job:
-- the period is a promise of its own, and `job_id` then names a job that is gone.
create table {schema}.kept_keys (
    key    text primary key,
    job_id bigint not null,
    until  timestamptz not null
);
create index kept_keys_until on {schema}.kept_keys (until);

-- Cancel what is still pending, in favour of others; says whether anything was.
create function {schema}.displace(p_ids bigint[], p_by bigint[]) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_ids bigint[];
    v_tied bigint[];
begin
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j where j.id = any (p_ids) and j.state = 'pending' order by j.id for update) x;
    if v_ids is null then
        return false;
    end if;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, blocked = null, finished_at = clock_timestamp(), live_key = null,
            error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = 'replaced by job ' || u.by, error_details = null
        from unnest(p_ids, p_by) as u(id, by)
        where j.id = u.id and j.id = any (v_ids)
        returning j.id, j.tied, u.by
    ), told as (
        insert into {schema}.events (kind, job_id, message)
        select 'cancelled', s.id, 'Replaced by job ' || s.by || ', which has the same unique key' from stopped s
    )
    select array_agg(s.id order by s.id) filter (where s.tied) into v_tied from stopped s;
    if v_tied is not null then
        perform {schema}.settled(v_tied, array_fill('cancelled'::text, array[cardinality(v_tied)]));
    end if;
    return true;
end
$body$;

create function {schema}.refuse_duplicate(p_key_of bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    raise exception 'job % has this unique key', p_key_of using errcode = 'UQ001', detail = p_key_of::text;
end
$body$;

-- Of those at the places `p_left`, whose keys `p_owners` have: refuse, or replace what is still pending, where they say so.
-- Says whether something was replaced, and is worth another try.
create function {schema}.replace_owners(p_left bigint[], p_owners bigint[], p_ids bigint[], p_more jsonb[]) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_owners bigint[];
    v_by bigint[];
begin
    perform {schema}.refuse_duplicate(u.owner)
    from unnest(p_left, p_owners) as u(place, owner)
    where u.owner is not null and p_more[u.place] ->> 'on_duplicate' = 'refuse' limit 1;
    select array_agg(x.owner), array_agg(x.by) into v_owners, v_by from (
        select distinct on (u.owner) u.owner, p_ids[u.place] as by from unnest(p_left, p_owners) as u(place, owner)
        where u.owner is not null and p_more[u.place] ->> 'on_duplicate' = 'replace'
        order by u.owner, u.place) x;
    if v_owners is null then
        return false;
    end if;
    if {schema}.displace(v_owners, v_by) then
        return true;
    end if;
    -- Who is not pending has begun and keeps its key, or ended just now, replaced by another: then the key is free. A
    -- statement of its own, to see what happened while we waited.
    return exists (
        select 1 from unnest(v_owners) as u(id)
        where not exists (select 1 from {schema}.jobs j where j.id = u.id and j.live_key is not null));
end
$body$;

-- Take the keys that are asked for a period; gives the places of those whose key somebody else has, with whose.
create function {schema}.keep_keys(p_ids bigint[], p_unique_keys text[], p_more jsonb[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
#variable_conflict use_column
declare
    v_one record;
    v_owner bigint;
begin
    -- In the order of keys, so that two batches cannot wait for each other.
    for v_one in
        select u.id, u.key, u.more, u.n from unnest(p_ids, p_unique_keys, p_more) with ordinality as u(id, key, more, n)
        where u.key is not null and u.more ? 'unique_for_s'
        order by u.key collate "C", u.n
    loop
        insert into {schema}.kept_keys as k (key, job_id, until)
        values (v_one.key, v_one.id, clock_timestamp() + make_interval(secs => (v_one.more ->> 'unique_for_s')::double precision))
        on conflict (key) do update set job_id = excluded.job_id, until = excluded.until where k.until <= clock_timestamp();
        continue when found;
        select k.job_id into v_owner from {schema}.kept_keys k where k.key = v_one.key;
        -- Our own from before: this enqueue is repeated.
        continue when v_owner = v_one.id;
        if v_one.more ->> 'on_duplicate' = 'refuse' then
            perform {schema}.refuse_duplicate(v_owner);
        elsif v_one.more ->> 'on_duplicate' = 'replace' then
            if {schema}.displace(array[v_owner], array[v_one.id]) then
                update {schema}.kept_keys k
                set job_id = v_one.id, until = clock_timestamp() + make_interval(secs => (v_one.more ->> 'unique_for_s')::double precision)
                where k.key = v_one.key;
                continue;
            end if;
        end if;
        place := v_one.n;
        job_id := v_owner;
        return next;
    end loop;
end
$body$;

-- Expiry ----------------------------------------------------------------------------------------

-- Cancel those of these jobs that were not begun in time; gives the queues in which others became ready by it. Whoever calls
-- has locked them, and their workflows.
create function {schema}.expire_those(p_ids bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_tied bigint[];
begin
    with expired as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, blocked = null, finished_at = clock_timestamp(), live_key = null,
            error_code = 'EXPIRED', error_message = 'Job expired before it began',
            error_cause = format('it waited for %s s and was good for %s s',
                round(date_part('epoch', clock_timestamp() - coalesce(j.run_at, j.enqueued_at))::numeric, 1)::double precision,
                round(date_part('epoch', j.expires_at - coalesce(j.run_at, j.enqueued_at))::numeric, 1)::double precision),
            error_details = null
        where j.id = any (p_ids) and j.state = 'pending' and j.expires_at <= clock_timestamp()
        returning j.id, j.tied, j.error_cause
    ), told as (
        insert into {schema}.events (kind, job_id, message)
        select 'expired', e.id, 'EXPIRED: ' || e.error_cause from expired e
    )
    select array_agg(e.id order by e.id) filter (where e.tied) into v_tied from expired e;
    return case when v_tied is null then '{}'
                else {schema}.settled(v_tied, array_fill('cancelled'::text, array[cardinality(v_tied)])) end;
end
$body$;

-- The same of jobs that a turn found instead of work. It has them in hand, and may not wait for a workflow any more; and
-- where it has held lines (`p_late`), not for lines either. What it leaves, the sweep finds.
create function {schema}.expire_found(p_ids bigint[], p_late boolean) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_flows bigint[];
begin
    if not p_late then
        v_flows := {schema}.free_workflows(array(
            select j.workflow_id from {schema}.jobs j
            where j.id = any (p_ids) and j.workflow_id is not null and j.expires_at <= clock_timestamp()));
    end if;
    return {schema}.expire_those(array(
        select j.id from {schema}.jobs j
        where j.id = any (p_ids) and (j.tied is null or not p_late and (j.workflow_id is null or j.workflow_id = any (v_flows)))));
end
$body$;

-- The sweep for them; what somebody has in hand just now is looked at when it is claimed.
create function {schema}.expire_due_v1(
    p_limit integer, out expired integer, out next_in_s double precision, out queues text[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set lock_timeout = '400ms'
as $body$
declare
    v_ids bigint[];
    v_flows bigint[];
begin
    v_ids := array(
        select j.id from {schema}.jobs j
        where j.expires_at is not null and (j.ready or j.waiting or j.blocked) and j.expires_at <= now()
        order by j.expires_at limit p_limit);
    v_flows := {schema}.free_workflows(array(
        select distinct j.workflow_id from {schema}.jobs j where j.id = any (v_ids) and j.workflow_id is not null));
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j
        where j.id = any (v_ids) and j.state = 'pending' and j.expires_at <= now()
          and (j.workflow_id is null or j.workflow_id = any (v_flows)) for update skip locked) x;
    expired := coalesce(cardinality(v_ids), 0);
    queues := case when v_ids is null then '{}' else {schema}.expire_those(v_ids) end;
    select greatest(0, date_part('epoch', x.expires_at - clock_timestamp())) into next_in_s from (
        select j.expires_at from {schema}.jobs j
        where j.expires_at is not null and (j.ready or j.waiting or j.blocked)
        order by j.expires_at limit 1) x;
end
$body$;

-- The guard against starvation ------------------------------------------------------------------

-- Lift to the front of their queues a few of the jobs that waited longer than so many seconds behind more urgent ones. The
-- walk goes from queue to queue and from rank to rank in the index. So few wait there at a time that urgent work
-- stands behind a handful and not behind a crowd.
create function {schema}.lift_starving_v1(p_waited_s double precision, p_front integer, p_at_once integer)
returns table (queue text, count bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_queue text := '';
    v_rank integer;
    v_left bigint;
    v_ids bigint[];
    v_before constant timestamptz := now() - make_interval(secs => p_waited_s);
begin
    loop
        select j.queue into v_queue from {schema}.jobs j where j.ready and j.queue > v_queue order by j.queue limit 1;
        exit when v_queue is null;
        select p_at_once - count(*) into v_left from (
            select 1 from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank <= p_front
            order by j.rank, j.id limit p_at_once) x;
        -- The most urgent of the others have nobody before them.
        select j.rank into v_rank from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank > p_front
        order by j.rank limit 1;
        v_ids := '{}';
        while v_left > 0 and v_rank is not null loop
            select j.rank into v_rank from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank > v_rank
            order by j.rank limit 1;
            exit when v_rank is null;
            select v_ids || array_agg(x.id) into v_ids from (
                select y.id from (
                    select j.id, coalesce(j.run_at, j.enqueued_at) as due_at from {schema}.jobs j
                    where j.ready and j.queue = v_queue and j.rank = v_rank
                    order by j.id limit 10 * p_at_once for update skip locked) y
                where y.due_at < v_before order by y.due_at limit v_left) x;
            v_left := p_at_once - coalesce(cardinality(v_ids), 0);
        end loop;
        continue when coalesce(cardinality(v_ids), 0) = 0;
        insert into {schema}.events (kind, job_id, message)
        select 'lifted', j.id, format('It waited behind more urgent jobs for %s s at priority %s, and went to the front of queue %L',
                                      round(date_part('epoch', clock_timestamp() - coalesce(j.run_at, j.enqueued_at))), -j.rank, j.queue)
        from {schema}.jobs j where j.id = any (v_ids);
        update {schema}.jobs j set rank = p_front where j.id = any (v_ids);
        queue := v_queue;
        count := cardinality(v_ids);
        return next;
    end loop;
end
$body$;

-- Retention -------------------------------------------------------------------------------------

-- How far the walks of retention have come. Apart from `ledger`, whose row others may not be kept from.
create table {schema}.sweeps (
    name        text primary key,
    -- A walk goes on behind this id.
    position    bigint not null default 0,
    -- The lowest id that this walk has left where it is. The next walk begins there: rows that are dead, and that an old
    -- snapshot keeps vacuum from removing, are not read again with every walk.
    lowest_left bigint,
    -- When a walk last began at the lowest id of all: an id may be committed later than those behind it.
    whole_at    timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Remove ended jobs with all that belongs to them. Whoever calls has locked them. Ordinary jobs have no rows in the other
-- tables: one look at the range of ids says so, instead of one for each job. A unique key for a period stays.
create function {schema}.forget(p_ids bigint[]) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $body$
declare
    v_low bigint;
    v_high bigint;
    v_removed integer;
begin
    select min(u.id), max(u.id) into v_low, v_high from unnest(p_ids) as u(id);
    if v_low is null then
        return 0;
    end if;
    if exists (select 1 from {schema}.attempts a where a.job_id between v_low and v_high) then
        delete from {schema}.attempts a where a.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.outputs o where o.job_id between v_low and v_high) then
        delete from {schema}.outputs o where o.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.autopsies y where y.job_id between v_low and v_high) then
        delete from {schema}.autopsies y where y.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.progress p where p.job_id between v_low and v_high) then
        delete from {schema}.progress p where p.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.letters l where l.job_id between v_low and v_high) then
        delete from {schema}.letters l where l.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.journal k where k.job_id between v_low and v_high)
       or exists (select 1 from {schema}.signals s where s.job_id between v_low and v_high) then
        perform {schema}.forget_journals(p_ids);
    end if;
    if exists (select 1 from {schema}.workflows w where w.id between v_low and v_high) then
        perform {schema}.forget_workflows(p_ids);
    end if;
    delete from {schema}.jobs j where j.id = any (p_ids);
    get diagnostics v_removed = row_count;
    return v_removed;
end
$body$;

-- Remove finished jobs among the next `p_look` by id, and say where the look ended (`next_after`; NULL: at the last job, or
-- where jobs are younger than asked for), its last id, and the lowest id that was left. Walks the primary key, so that
-- retention costs the hot path no index.
create function {schema}.prune_batch_v1(
    p_after bigint, p_older_than_s double precision, p_states text[], p_look integer,
    out next_after bigint, out removed integer, out last_id bigint, out lowest_left bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '400ms'
as $body$
declare
    v_now constant timestamptz := clock_timestamp();
    v_before constant timestamptz := v_now - make_interval(secs => p_older_than_s);
    v_seen bigint;
    v_young boolean;
    v_found bigint[];
    v_flows bigint[];
    v_old bigint[];
begin
    -- A job from the future (the clock was set back) says nothing of the age of those behind it.
    select count(*), max(x.id), coalesce(bool_or(x.enqueued_at > v_before and x.enqueued_at <= v_now), false),
           array_agg(x.id) filter (where x.old), min(x.id) filter (where not x.old),
           array_agg(distinct x.workflow_id) filter (where x.old and x.workflow_id is not null)
    into v_seen, last_id, v_young, v_found, lowest_left, v_flows
    from (
        select j.id, j.enqueued_at, j.workflow_id,
               coalesce(j.finished_at < v_before and (p_states is null or j.state = any (p_states))
                        -- Its task may have asked to keep it for longer.
                        and (j.keep_s is null or j.finished_at < v_now - make_interval(secs => j.keep_s)), false) as old
        from {schema}.jobs j where j.id > p_after order by j.id limit p_look
    ) x;
    removed := 0;
    if v_found is not null then
        -- Whoever opens one again has it in hand, and needs the results of its nodes.
        v_flows := case when v_flows is not null then {schema}.free_workflows(v_flows) end;
        -- Looked at once more under the lock: somebody may have retried it.
        select array_agg(y.id) into v_old from (
            select j.id from {schema}.jobs j
            where j.id = any (v_found)
              and coalesce(j.finished_at < v_before, false)
              -- Others may still need its result.
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w
                  where w.id = j.workflow_id and (w.finished_at is null or w.id <> all (coalesce(v_flows, '{}')))))
            for update skip locked
        ) y;
        removed := {schema}.forget(v_old);
        if removed < cardinality(v_found) then
            lowest_left := least(lowest_left, (
                select min(f.id) from (select unnest(v_found) as id except select unnest(v_old)) f));
        end if;
    end if;
    next_after := case when v_seen = p_look and not v_young then last_id end;
end
$body$;

-- One step of the walk of retention; says whether there is more of it at once. What was removed and is lost with the power is
-- removed again: the commit does not wait for the disk.
create function {schema}.sweep_jobs_v1(
    p_older_than_s double precision, p_look integer, out removed integer, out more boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_walk {schema}.sweeps;
    v_batch record;
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into {schema}.sweeps (name) values ('jobs') on conflict do nothing;
    select * into v_walk from {schema}.sweeps s where s.name = 'jobs' for update;
    select * into v_batch from {schema}.prune_batch_v1(v_walk.position, p_older_than_s, null, p_look);
    removed := v_batch.removed;
    more := v_batch.next_after is not null;
    v_walk.lowest_left := least(v_walk.lowest_left, v_batch.lowest_left);
    if more then
        v_walk.position := v_batch.next_after;
    else
        v_walk.position := coalesce(v_walk.lowest_left - 1, v_batch.last_id, v_walk.position);
        v_walk.lowest_left := null;
        if v_walk.whole_at not between clock_timestamp() - interval '1 day' and clock_timestamp() then
            v_walk.position := 0;
            v_walk.whole_at := clock_timestamp();
        end if;
    end if;
    update {schema}.sweeps s set position = v_walk.position, lowest_left = v_walk.lowest_left, whole_at = v_walk.whole_at
    where s.name = 'jobs' and (s.position, s.lowest_left, s.whole_at)
          is distinct from (v_walk.position, v_walk.lowest_left, v_walk.whole_at);
end
$body$;

-- Ids go with time: looking at the first few is enough. An event from the future (the clock was set back) is passed over.
create function {schema}.sweep_events_v1(p_older_than_s double precision, p_limit integer) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '400ms'
as $body$
declare
    v_after bigint;
    v_last bigint;
    v_removed integer;
begin
    perform set_config('synchronous_commit', 'off', true);
    -- Once a day from the first one on: see `sweeps`.
    select case when s.whole_at between clock_timestamp() - interval '1 day' and clock_timestamp() then s.position end
    into v_after from {schema}.sweeps s where s.name = 'events';
    with first as (
        select e.id, e.at from {schema}.events e
        where e.id > coalesce(v_after, 0) and e.at <= clock_timestamp() order by e.id limit p_limit
    ), gone as (
        delete from {schema}.events e using first f
        where e.id = f.id and f.at < clock_timestamp() - make_interval(secs => p_older_than_s)
        returning e.id
    )
    select count(*), max(g.id) into v_removed, v_last from gone g;
    if v_after is null or v_removed > 0 then
        insert into {schema}.sweeps as s (name, position) values ('events', coalesce(v_last, v_after, 0))
        on conflict (name) do update set
            position = excluded.position, whole_at = case when v_after is null then excluded.whole_at else s.whole_at end;
    end if;
    return v_removed;
end
$body$;

-- The tombstone stays until everything that the worker held is settled.
create function {schema}.sweep_workers_v1(p_older_than_s double precision, p_limit integer) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_removed integer;
begin
    with gone as (
        delete from {schema}.workers w
        where w.id in (
            select d.id from {schema}.workers d
            where d.state in ('dead', 'stopped') and d.stopped_at < clock_timestamp() - make_interval(secs => p_older_than_s)
              and not exists (select 1 from {schema}.jobs j where j.held and j.worker_id = d.id)
            limit p_limit
            for update skip locked)
        returning w.id
    ), unheard as (
        delete from {schema}.beats b using gone g where b.worker_id = g.id
    )
    select count(*) into v_removed from gone;
    return v_removed;
end
$body$;

-- Remove what was to be kept for a time of its own, and keys whose period is over.
create function {schema}.sweep_kept_v1(p_limit integer, out jobs integer, out keys integer)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '400ms'
as $body$
declare
    v_keep_s double precision := -1;
    v_ids bigint[] := '{}';
    v_found bigint[];
    v_flows bigint[];
begin
    perform set_config('synchronous_commit', 'off', true);
    delete from {schema}.kept_keys k where k.key in (
        select o.key from {schema}.kept_keys o where o.until < now() order by o.until limit p_limit for update skip locked);
    get diagnostics keys = row_count;
    loop
        select j.keep_s into v_keep_s from {schema}.jobs j
        where j.keep_s is not null and j.finished_at is not null and j.keep_s > v_keep_s order by j.keep_s limit 1;
        exit when v_keep_s is null or cardinality(v_ids) >= p_limit;
        select array_agg(x.id), array_agg(distinct x.workflow_id) filter (where x.workflow_id is not null)
        into v_found, v_flows
        from (
            select j.id, j.workflow_id from {schema}.jobs j
            where j.keep_s = v_keep_s and j.finished_at is not null and j.finished_at < now() - make_interval(secs => v_keep_s)
              -- Others may still need its result.
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w where w.id = j.workflow_id and w.finished_at is null))
            order by j.finished_at limit p_limit - cardinality(v_ids)
        ) x;
        continue when v_found is null;
        -- Whoever opens one again has it in hand, and needs the results of its nodes.
        v_flows := case when v_flows is not null then {schema}.free_workflows(v_flows) end;
        v_ids := v_ids || array(
            select j.id from {schema}.jobs j
            where j.id = any (v_found) and coalesce(j.finished_at < now() - make_interval(secs => v_keep_s), false)
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w
                  where w.id = j.workflow_id and (w.finished_at is null or w.id <> all (coalesce(v_flows, '{}')))))
            for update skip locked);
    end loop;
    jobs := {schema}.forget(v_ids);
end
$body$;

-- Other sessions' locks ---------------------------------------------------------------------------

-- Of these jobs, those that cannot be ended now because another session holds their row or that of their workflow, with the
-- session where it can be known. Waits for nobody, and changes nothing.
create function {schema}.blocked_outcomes_v1(p_ids bigint[]) returns table (job_id bigint, session_pid integer)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set lock_timeout = '200ms'
as $body$
#variable_conflict use_column
declare
    v_flows constant bigint[] := {schema}.free_workflows(array(
        select distinct j.workflow_id from {schema}.jobs j where j.id = any (p_ids) and j.workflow_id is not null));
    v_free constant bigint[] := array(
        select j.id from {schema}.jobs j
        where j.id = any (p_ids) and (j.workflow_id is null or j.workflow_id = any (v_flows))
        for update skip locked);
begin
    return query
    select j.id, (
        select l.pid from pg_catalog.pg_locks l
        where l.locktype = 'transactionid' and l.granted and l.mode = 'ExclusiveLock' and l.pid <> pg_backend_pid()
          and l.transactionid in (j.xmax, w.xmax)
        limit 1)
    from {schema}.jobs j left join {schema}.workflows w on w.id = j.workflow_id
    where j.id = any (p_ids) and j.id <> all (v_free);
end
$body$;

-- A clock that is set back --------------------------------------------------------------------------

-- What the clock said when a reaper last looked.
create table {schema}.clock (
    one boolean primary key default true check (one),
    at  timestamptz not null
) with (fillfactor = 50);

-- Note what the clock says, and give by how much it was set back since the last look. Then retries wait for the rest of
-- their backoff, not until the clock has caught up: those due soonest are moved. Where a caller named the time of a job,
-- it stays. Alerts that last are told on.
create function {schema}.follow_clock_v1(p_limit integer) returns double precision
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $body$
declare
    -- Clocks are corrected by less than that all the time.
    c_step_s constant double precision := 2;
    v_now constant timestamptz := clock_timestamp();
    v_step_s double precision;
begin
    perform set_config('synchronous_commit', 'off', true);
    select extract(epoch from c.at - v_now) into v_step_s from {schema}.clock c for update;
    insert into {schema}.clock as c (at) values (v_now) on conflict (one) do update set at = excluded.at;
    if coalesce(v_step_s, 0) < c_step_s then
        return 0;
    end if;
    update {schema}.jobs j set run_at = greatest(v_now, j.run_at - make_interval(secs => v_step_s))
    where j.id in (
        select w.id from {schema}.jobs w
        where w.waiting and w.run_at > v_now and w.state = 'pending' and w.attempt > 0
        order by w.run_at limit p_limit for update skip locked);
    update {schema}.conditions c set
        seen_at = least(c.seen_at, v_now),
        begun_at = case when c.begun_at is not null then least(c.begun_at, v_now) end,
        reminded_at = case when c.reminded_at is not null then least(c.reminded_at, v_now) end
    where greatest(c.seen_at, c.begun_at, c.reminded_at) > v_now;
    return v_step_s;
end
$body$;
