-- Lines: how many jobs with the same concurrency key may be at work at once; limits of queues.

create function {schema}.leave_lines(p_ids bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return '{}';
end
$body$;

create function {schema}.admit(p_lines text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return;
end
$body$;
