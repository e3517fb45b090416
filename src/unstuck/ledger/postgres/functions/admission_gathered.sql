-- Gather the lines of one transaction, and lock them at its end in their order.

-- A transaction that moves a workflow on frees places in some lines and needs places in others, step by step; two that took
-- lines as they came to them would wait for each other. So they are noted from here on, for the rest of the transaction,
-- and locked in their order by `let_in_gathered`. Says whether it was this call that began it: that one ends it too.
create or replace function {schema}.gather_lines() returns boolean
language plpgsql volatile
{fixed_path}
as $body$
begin
    if {schema}.gathers_lines() then
        return false;
    end if;
    perform set_config('unstuck.lines', '[]', true);
    return true;
end
$body$;

create or replace function {schema}.gathers_lines() returns boolean
language plpgsql stable
{fixed_path}
as $body$
begin
    return coalesce(current_setting('unstuck.lines', true), '') <> '';
end
$body$;

create or replace function {schema}.note_lines(p_lines jsonb) returns void
language plpgsql volatile
{fixed_path}
as $body$
begin
    if p_lines is not null then
        perform set_config('unstuck.lines', (current_setting('unstuck.lines')::jsonb || p_lines)::text, true);
    end if;
end
$body$;

create or replace function {schema}.let_in_gathered() returns text[]
language plpgsql volatile
{fixed_path}
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
