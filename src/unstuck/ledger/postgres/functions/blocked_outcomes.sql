-- Find out which outcomes are blocked by locks of other sessions.

-- Of these jobs, those that cannot be ended now because another session holds their row or that of their workflow, with the
-- session where it can be known. Never waits, and changes nothing.
create or replace function {schema}.blocked_outcomes_v1(p_ids bigint[]) returns table (job_id bigint, session_pid integer)
language plpgsql volatile
{index_scans}
set lock_timeout = '200ms'
as $body$
#variable_conflict use_column
declare
    v_flows constant bigint[] := {schema}.free_workflows(array(
        select distinct j.workflow_id from {schema}.jobs j where j.id = any (p_ids) and j.workflow_id is not null));
    v_free constant bigint[] := array(
        select j.id from {schema}.jobs j
        where j.id = any (p_ids) and (j.workflow_id is null or j.workflow_id = any (v_flows))
        for update skip locked);
begin
    return query
    select j.id, (
        select l.pid from pg_catalog.pg_locks l
        where l.locktype = 'transactionid' and l.granted and l.mode = 'ExclusiveLock' and l.pid <> pg_backend_pid()
          and l.transactionid in (j.xmax, w.xmax)
        limit 1)
    from {schema}.jobs j left join {schema}.workflows w on w.id = j.workflow_id
    where j.id = any (p_ids) and j.id <> all (v_free);
end
$body$;
