-- Admissions that are left for later, because another session is in the way.

-- Leave the admission at these concurrency keys to `admit_postponed`, with the limits that those who joined wanted.
create or replace function {schema}.postpone_admissions(p_keys text[], p_more jsonb[], p_held boolean) returns void
language plpgsql volatile
{fixed_path}
as $body$
begin
    insert into {schema}.postponed_admissions (concurrency_key, places, held)
    select u.concurrency_key, (
        select (m.more ->> 'concurrency_limit')::integer from unnest(p_more) with ordinality as m(more, n)
        where m.more ->> 'concurrency_key' = u.concurrency_key and m.more ? 'concurrency_limit' and not m.more ? 'later'
        order by m.n desc limit 1), p_held
    from unnest(p_keys) as u(concurrency_key) where u.concurrency_key is not null
    group by u.concurrency_key;
end
$body$;

-- As `admit_gathered`, for a transaction that may stay open: it takes no lock that workers need.
create or replace function {schema}.postpone_gathered() returns void
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_more constant jsonb[] := array(
        select e.value from jsonb_array_elements(current_setting('unstuck.concurrency_keys')::jsonb) with ordinality as e(value, n)
        order by e.n);
begin
    perform set_config('unstuck.concurrency_keys', '', true);
    perform {schema}.postpone_admissions(array(select m ->> 'concurrency_key' from unnest(v_more) as m), v_more, false);
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
    v_keys text[];
    v_free text[];
begin
    -- From key to key in the index: a key that somebody holds may have thousands of notes, and hides no other.
    with recursive found (concurrency_key) as (
        (select p.concurrency_key from {schema}.postponed_admissions p order by p.concurrency_key limit 1)
        union all
        select (select p.concurrency_key from {schema}.postponed_admissions p where p.concurrency_key > f.concurrency_key order by p.concurrency_key limit 1)
        from found f where f.concurrency_key is not null
    )
    select array_agg(x.concurrency_key) into v_keys from (select f.concurrency_key from found f where f.concurrency_key is not null limit p_limit) x;
    if v_keys is null then
        return '{}';
    end if;
    v_free := array(select l.key from {schema}.concurrency_keys l where l.key = any (v_keys) order by l.key for update skip locked);
    return {schema}.admit_now(
        v_free || array(select u.concurrency_key from unnest(v_keys) as u(concurrency_key)
                        where not exists (select 1 from {schema}.concurrency_keys l where l.key = u.concurrency_key)), null);
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
