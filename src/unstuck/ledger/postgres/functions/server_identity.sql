-- Which run of which server this is, and which numbers a server that was lost may have given out.

-- The identity of this run of this server: system identifier, timeline, start of the postmaster. A session proves
-- something only while this is the same as when the session was registered: after a failover, a promotion, a restart or
-- a restore it differs. `_INCARNATION` in connecting.py computes the same text before there are any tables.
create or replace function {schema}.incarnation() returns text
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_system text := '-';
begin
    -- Asked before, because a function is refused as soon as a statement names it.
    if has_function_privilege('pg_catalog.pg_control_system()', 'execute') then
        select c.system_identifier::text into v_system from pg_control_system() c;
    end if;
    return v_system
        || '/' || case when pg_is_in_recovery() then '-' else left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) end
        || '/' || extract(epoch from pg_postmaster_start_time())::text;
end
$body$;

-- After a promotion: the lost primary may have given out numbers of jobs and attempts in transactions that were never
-- replicated. No other job may get them. So both sequences go on from the present time, as after a restore: to skip the
-- same count each time is not enough if a second standby takes over that lacks what the first one wrote. Every connection
-- of ours asks before it does anything else. Behind a pooler, where a connection outlives a promotion, every call asks.
create or replace function {schema}.skip_lost_numbers_v1() returns void
language plpgsql volatile
{fixed_path}
as $body$
declare
    -- Every promotion begins a new timeline.
    v_timeline text := left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
    v_sequence regclass;
begin
    if not exists (select from {schema}.ledger l where l.numbered_on <> v_timeline) then
        return;
    end if;
    -- Whoever comes second waits here until the numbers are skipped.
    perform from {schema}.ledger l where l.numbered_on <> v_timeline for no key update;
    if found then
        foreach v_sequence in array array['{schema}.tokens'::regclass, '{schema}.job_ids'::regclass] loop
            perform setval(v_sequence, {schema}.first_after_restore(nextval(v_sequence)));
        end loop;
        update {schema}.ledger set numbered_on = v_timeline where one;
    end if;
end
$body$;
