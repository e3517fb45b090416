-- Names of workers.

-- Return whether no living worker of the other kind has this name: Python workers may share one, and any other worker is
-- alone with its own. Two registrations of one name have an order: the second one sees what the first one did.
create or replace function {schema}.worker_name_is_free_v1(p_name text, p_python boolean) returns boolean
language plpgsql volatile
{index_scans}
as $body$
begin
    perform pg_advisory_xact_lock(hashtextextended('{schema}.worker_name_is_free_v1 ' || p_name, 0));
    if p_python then
        return not exists (
            select 1 from {schema}.workers w
            where w.name = p_name and w.transport <> 'python' and w.state in ('active', 'draining', 'suspect'));
    end if;
    return not exists (
        select 1 from {schema}.workers w
        where w.name = p_name and w.transport = 'python' and w.state in ('active', 'draining', 'suspect'));
end
$body$;
