-- Admissions that are left for later, because another session is in the way.

-- Leave the admission at these concurrency keys to `admit_postponed`, with the limits that those who joined wanted.
create or replace function {schema}.postpone_admissions(p_lines text[], p_more jsonb[], p_held boolean) returns void
language plpgsql volatile
{fixed_path}
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
create or replace function {schema}.postpone_gathered() returns void
language plpgsql volatile
{fixed_path}
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

-- Do the admissions that were left for later, as far as no session holds those keys now; never waits. Gives the queues in
-- which jobs became ready.
create or replace function {schema}.admit_postponed(p_limit integer) returns text[]
language plpgsql volatile
{index_scans}
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
create or replace function {schema}.postponed_in_s_v1() returns double precision
language sql stable
{index_scans}
as $body$
    select case when p.at > clock_timestamp() - interval '2 seconds' then 0.2 else 1.0 end
    from {schema}.postponed_admissions p order by p.id desc limit 1
$body$;
