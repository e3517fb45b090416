-- Unique keys: what happens if another job has the key, and keys that are kept for a period.

-- Cancel what is still pending, in favour of others; says whether anything was.
create or replace function {schema}.displace(p_ids bigint[], p_by bigint[]) returns boolean
language plpgsql volatile
{index_scans}
as $body$
declare
    v_ids bigint[];
    v_linked bigint[];
begin
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j where j.id = any (p_ids) and j.state = 'pending' order by j.id for update) x;
    if v_ids is null then
        return false;
    end if;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, scheduled = false, blocked = null, finished_at = clock_timestamp(), active_key = null,
            error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = 'replaced by job ' || u.by, error_details = null
        from unnest(p_ids, p_by) as u(id, by)
        where j.id = u.id and j.id = any (v_ids)
        returning j.id, j.has_links, u.by
    ), told as (
        insert into {schema}.events (kind, job_id, message)
        select 'cancelled', s.id, 'Replaced by job ' || s.by || ', which has the same unique key' from stopped s
    )
    select array_agg(s.id order by s.id) filter (where s.has_links) into v_linked from stopped s;
    if v_linked is not null then
        perform {schema}.settled(v_linked, array_fill('cancelled'::text, array[cardinality(v_linked)]));
    end if;
    return true;
end
$body$;

create or replace function {schema}.refuse_duplicate(p_key_of bigint) returns void
language plpgsql volatile
{fixed_path}
as $body$
begin
    raise exception 'job % has this unique key', p_key_of using errcode = 'UQ001', detail = p_key_of::text;
end
$body$;

-- Of those at the places `p_left`, whose keys `p_owners` have: refuse, or replace what is still pending, where they say so.
-- Says whether something was replaced, and is worth another try.
create or replace function {schema}.replace_owners(p_left bigint[], p_owners bigint[], p_ids bigint[], p_more jsonb[]) returns boolean
language plpgsql volatile
{fixed_path}
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
        where not exists (select 1 from {schema}.jobs j where j.id = u.id and j.active_key is not null));
end
$body$;

-- Take the keys that are asked for a period; gives the places of those whose key another job has, with its id.
create or replace function {schema}.keep_keys(p_ids bigint[], p_unique_keys text[], p_more jsonb[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
{index_scans}
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
        insert into {schema}.unique_keys as k (key, job_id, until)
        values (v_one.key, v_one.id, clock_timestamp() + make_interval(secs => (v_one.more ->> 'unique_for_s')::double precision))
        on conflict (key) do update set job_id = excluded.job_id, until = excluded.until where k.until <= clock_timestamp();
        continue when found;
        select k.job_id into v_owner from {schema}.unique_keys k where k.key = v_one.key;
        -- Our own from before: this enqueue is repeated.
        continue when v_owner = v_one.id;
        if v_one.more ->> 'on_duplicate' = 'refuse' then
            perform {schema}.refuse_duplicate(v_owner);
        elsif v_one.more ->> 'on_duplicate' = 'replace' then
            if {schema}.displace(array[v_owner], array[v_one.id]) then
                update {schema}.unique_keys k
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
