-- What operators and retention do to jobs.

-- Cancel what waits or was only claimed; ask for what runs, and tell its worker at its next beat.
--
-- Of several jobs those that somebody has in hand just now are left alone ('busy'): a turn locks jobs in an order of its
-- own, and whoever waits for one while holding another would wait for ever. One job alone is waited for.
create function {schema}.cancel_v1(p_ids bigint[], p_by text)
returns table (job_id bigint, answer text, worker_id text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_free bigint[];
begin
    if cardinality(p_ids) = 1 then
        perform 1 from {schema}.jobs j where j.id = p_ids[1] for update;
    end if;
    select array_agg(x.id) into v_free from (
        select j.id from unnest(p_ids) as u(id) join {schema}.jobs j on j.id = u.id for update of j skip locked
    ) x;
    return query
    with asked as materialized (
        select distinct u.id from unnest(p_ids) as u(id)
    ), found as materialized (
        select j.id, j.state, j.worker_id from {schema}.jobs j where j.id = any (v_free)
    ), stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, held = false, finished_at = clock_timestamp(),
            token = null, worker_id = null, claimed_at = null, live_key = null,
            error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = 'cancelled by ' || p_by || ' before it ran',
            error_details = null
        from found f
        where j.id = f.id and f.state in ('pending', 'claimed')
        returning j.id
    ), asked_to_stop as (
        update {schema}.jobs j set cancel_requested = true
        from found f
        where j.id = f.id and f.state = 'running'
        returning j.id, j.worker_id
    ), flagged as (
        update {schema}.beats b set cancels = true
        where b.worker_id = any (array(select distinct s.worker_id from asked_to_stop s))
    ), told as (
        insert into {schema}.events (kind, job_id, worker_id, message)
        select case when f.state = 'running' then 'cancel_requested' else 'cancelled' end, f.id, f.worker_id,
               case when f.state = 'running' then p_by || ' asked to cancel it'
                    else 'Cancelled by ' || p_by || ' before it ran' end
        from found f
        where f.state in ('pending', 'claimed', 'running')
    )
    select a.id,
           case when f.id is null then
                    case when exists (select 1 from {schema}.jobs j where j.id = a.id) then 'busy' else 'missing' end
                when f.state in ('pending', 'claimed') then 'cancelled'
                when f.state = 'running' then 'requested'
                else 'finished' end,
           case when f.state in ('claimed', 'running') then f.worker_id end
    from asked a left join found f on f.id = a.id;
end
$body$;

-- Queue a finished job again with fresh counters; its last attempt becomes history.
create function {schema}.retry_v1(p_id bigint, p_by text) returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_job record;
    v_now timestamptz;
begin
    select j.state, j.token into v_job from {schema}.jobs j where j.id = p_id for update;
    if not found then
        return 'missing';
    elsif v_job.state in ('pending', 'claimed', 'running') then
        return 'live';
    elsif v_job.state = 'succeeded' then
        return 'succeeded';
    end if;
    v_now := clock_timestamp();
    if v_job.token is not null then
        insert into {schema}.attempts (
            job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
        select j.id, j.token, j.worker_id, coalesce(j.ended_as, j.state), j.claimed_at, j.started_at, j.finished_at,
               least(b.beat_at, j.finished_at), j.error_code, coalesce(j.error_cause, j.error_message)
        from {schema}.jobs j left join {schema}.beats b on b.worker_id = j.worker_id
        where j.id = p_id
        on conflict do nothing;
    end if;
    update {schema}.jobs j set
        state = 'pending', ready = true, waiting = false, run_at = v_now, token = null, worker_id = null,
        claimed_at = null, started_at = null, finished_at = null, failures = 0, crash_count = 0,
        cancel_requested = null, result = null, ended_as = null, error_code = null, error_message = null,
        error_cause = null, error_details = null, live_key = j.unique_key
    where j.id = p_id;
    insert into {schema}.events (at, kind, job_id, message) values (v_now, 'retried', p_id, format('Queued again by %s (it was %s)', p_by, v_job.state));
    return 'queued';
exception when unique_violation then
    return 'duplicate';
end
$body$;

-- The number from which a sequence goes on after a restore: the time in microseconds since 1970. A sequence that hands out
-- fewer than a million numbers per second is always behind that. So whatever was handed out before is lower, however old
-- the backup is, however fast jobs came, and even if the same backup is restored twice. Such a number is below 2^53 until the
-- year 2255, so that JSON carries it exactly.
create function {schema}.first_after_restore(p_last bigint) returns bigint
language sql volatile
set search_path = pg_catalog, pg_temp
as $body$
    -- Should the clock be wrong, a billion is skipped.
    select greatest(p_last + 1000000000, floor(extract(epoch from clock_timestamp()) * 1000000)::bigint)
$body$;

-- After a restore from a backup: whoever lived then is dead, and what was handed out since is void.
create function {schema}.void_tokens_v1() returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
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
        state = 'pending', ready = true, waiting = false, held = false, token = null, worker_id = null, claimed_at = null
    where j.held and j.state = 'claimed';
    update {schema}.jobs j set token = nextval('{schema}.tokens'::regclass) where j.held;
    update {schema}.ledger set voided_at = v_now;
    return v_count;
end
$body$;
