-- After a restore from a backup.

-- The number from which a sequence goes on after a restore or a promotion: the time in microseconds since 1970. A sequence
-- that hands out fewer than a million numbers per second is always behind that. So whatever was handed out before is lower, however old
-- the backup is, however fast jobs came, and even if the same backup is restored twice. Such a number is below 2^53 until the
-- year 2255, so that JSON carries it exactly.
create or replace function {schema}.first_after_restore(p_last bigint) returns bigint
language sql volatile
{fixed_path}
as $body$
    -- A billion is skipped in any case, even if the last restore was a moment ago or the clock is wrong. Then
    -- the time decides how much more, so that two that go on from the same number do not give out the same ones.
    select case when p_last + 1000000000 <= t.us then t.us else p_last + 1000000000 + t.us % 1000000000000 end
    from (select floor(extract(epoch from clock_timestamp()) * 1000000)::bigint as us) t
$body$;

-- After a restore from a backup: all workers that lived then are dead, and what was handed out since is void.
create or replace function {schema}.void_tokens_v1() returns integer
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_sequence regclass;
    c_evidence constant text := 'the ledger was restored from a backup';
    v_now timestamptz := clock_timestamp();
    v_count integer;
begin
    -- Numbers that were given out after the backup was taken must never be given out again. Before the events below: a
    -- client that remembers the last event it saw must hear of them.
    foreach v_sequence in array array[
        '{schema}.tokens'::regclass, '{schema}.job_ids'::regclass, pg_get_serial_sequence('{schema}.events', 'id')::regclass,
        pg_get_serial_sequence('{schema}.audit', 'id')::regclass]
    loop
        perform setval(v_sequence, {schema}.first_after_restore(nextval(v_sequence)));
    end loop;
    -- Workers first, then jobs: the order of every turn and every settlement.
    with buried as (
        update {schema}.workers w set
            state = 'dead', suspect_at = null, stopped_at = v_now,
            verdict = jsonb_build_object('state', 'dead', 'detector', 'operator', 'silent_s', 0.0, 'by', 'operator',
                                         'evidence', c_evidence)
        where w.state in ('active', 'draining', 'suspect')
        returning w.id
    )
    insert into {schema}.events (at, kind, worker_id, message)
    select v_now, 'worker_dead', b.id, format('Dead worker detected: %s (%s)', b.id, c_evidence) from buried b;
    get diagnostics v_count = row_count;
    -- Against those who lock rows too, not only against those who change them already.
    lock table {schema}.jobs in exclusive mode;
    update {schema}.jobs j set
        state = 'pending', ready = true, scheduled = false, held = false, token = null, worker_id = null, claimed_at = null
    where j.held and j.state = 'claimed';
    update {schema}.jobs j set token = nextval('{schema}.tokens'::regclass) where j.held;
    update {schema}.ledger set voided_at = v_now;
    return v_count;
end
$body$;
