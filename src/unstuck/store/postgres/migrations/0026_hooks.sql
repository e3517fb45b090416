-- Work that follows the ends of other work.

create function {schema}.fire_hooks(p_ids bigint[], p_as text[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return '{}';
end
$body$;
