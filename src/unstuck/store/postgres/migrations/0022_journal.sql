-- What jobs wrote down on their way, and the signals that were sent to them.

create function {schema}.has_signal(p_job bigint, p_name text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return false;
end
$body$;

-- Write entries of attempts that this worker still runs.
create function {schema}.write_entries(p_worker text, p_entries jsonb)
returns table (job_id bigint, token bigint, written boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return;
end
$body$;

create function {schema}.follow_up(p_follow jsonb, p_ended bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return '{}';
end
$body$;

create function {schema}.forget_journals(p_ids bigint[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    return;
end
$body$;
