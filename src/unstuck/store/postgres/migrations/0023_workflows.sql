-- Workflows.

create function {schema}.advance(p_ids bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return '{}';
end
$body$;

create function {schema}.reopen(p_id bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return;
end
$body$;

create function {schema}.is_open(p_workflow bigint) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return false;
end
$body$;
