-- Gather the lines of one transaction, and lock them at its end in their order.

-- A transaction that moves a workflow on frees places in some lines and needs places in others, step by step; two that took
-- lines as they came to them would wait for each other. So they are noted from here on, for the rest of the transaction,
-- and locked in their order by `admit_gathered`. Says whether it was this call that began it: that one ends it too.
create or replace function {schema}.gather_keys() returns boolean
language plpgsql volatile
{fixed_path}
as $body$
begin
    if {schema}.gathers_keys() then
        return false;
    end if;
    perform set_config('unstuck.concurrency_keys', '[]', true);
    return true;
end
$body$;

create or replace function {schema}.gathers_keys() returns boolean
language plpgsql stable
{fixed_path}
as $body$
begin
    return coalesce(current_setting('unstuck.concurrency_keys', true), '') <> '';
end
$body$;

create or replace function {schema}.note_keys(p_keys jsonb) returns void
language plpgsql volatile
{fixed_path}
as $body$
begin
    if p_keys is not null then
        perform set_config('unstuck.concurrency_keys', (current_setting('unstuck.concurrency_keys')::jsonb || p_keys)::text, true);
    end if;
end
$body$;

create or replace function {schema}.admit_gathered() returns text[]
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_noted constant text := current_setting('unstuck.concurrency_keys');
    v_more jsonb[];
begin
    perform set_config('unstuck.concurrency_keys', '', true);
    if v_noted = '[]' then
        return '{}';
    end if;
    v_more := array(select e.value from jsonb_array_elements(v_noted::jsonb) with ordinality as e(value, n) order by e.n);
    return {schema}.admit_now(array(select m ->> 'concurrency_key' from unnest(v_more) as m), v_more);
end
$body$;
