-- Proofs of life, and the verdicts on those who give none.

-- Push the deadline of a worker forward: one narrow row, HOT, never an insert.
create function {schema}.beat(
    p_worker text, p_running integer, p_processed bigint, p_metadata jsonb,
    p_session_pid integer, p_session_start timestamptz)
returns table (state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_worker record;
    v_last record;
    v_now timestamptz;
begin
    -- Who will change the row locks it so from the start: to strengthen a lock behind a waiting verdict is a deadlock.
    if p_metadata is not null
       or exists (select 1 from {schema}.workers w where w.id = p_worker and w.state = 'suspect') then
        perform 1 from {schema}.workers w where w.id = p_worker for no key update;
    end if;
    -- The share lock stands against a verdict: one of the two comes first, and the other sees it.
    select w.state, w.draining, w.request, w.suspect_after_s, w.heartbeat_interval_s into v_worker
    from {schema}.workers w where w.id = p_worker for share;
    if not found or v_worker.state in ('dead', 'stopped') then
        return query select coalesce(v_worker.state, 'dead'), false, null::text, null::bigint[], null::bigint[];
        return;
    end if;
    select b.beat_at, b.cancels into v_last from {schema}.beats b where b.worker_id = p_worker for update;
    if not found then
        return query select 'dead', false, null::text, null::bigint[], null::bigint[];
        return;
    end if;
    v_now := clock_timestamp();

    -- We are late, and nobody else has beaten since either: nobody could write. Time is forgiven to all.
    if v_now - v_last.beat_at > make_interval(secs => v_worker.suspect_after_s / 2)
       and not exists (
           select 1 from {schema}.beats b
           where b.worker_id <> p_worker
             and b.beat_at > v_last.beat_at + make_interval(secs => v_worker.heartbeat_interval_s))
    then
        update {schema}.ledger l set amnesty_at = v_now
        where l.one = (select k.one from {schema}.ledger k where k.amnesty_at < v_now for update skip locked);
    end if;

    cancel_ids := null;
    cancel_tokens := null;
    if v_last.cancels then
        select array_agg(j.id), array_agg(j.token) into cancel_ids, cancel_tokens
        from {schema}.jobs j
        where j.held and j.worker_id = p_worker and j.state = 'running' and j.cancel_requested;
    end if;
    update {schema}.beats set
        beat_at = v_now, running = p_running, processed = p_processed,
        session_pid = p_session_pid, session_start = p_session_start, cancels = cancel_ids is not null
    where worker_id = p_worker;

    state := v_worker.state;
    was_suspect := v_worker.state = 'suspect';
    request := v_worker.request;
    if was_suspect or p_metadata is not null then
        update {schema}.workers w set
            state = case when w.state <> 'suspect' then w.state when w.draining then 'draining' else 'active' end,
            suspect_at = null,
            verdict = case when w.state <> 'suspect' then w.verdict end,
            metadata = coalesce(p_metadata, w.metadata)
        where w.id = p_worker
        returning w.state into state;
        if was_suspect then
            insert into {schema}.events (at, kind, worker_id, message)
            values (v_now, 'worker_recovered', p_worker, 'It beat again: it was only slow.');
        end if;
    else
        -- A beat that a crash of the server forgets is forgiven by its restart: it need not wait for the disk.
        perform set_config('synchronous_commit', 'off', true);
    end if;
    return next;
end
$body$;

-- Whether the evidence still holds, with the identity row locked against turns, beats and other verdicts. Waits a
-- moment only: a turn in flight is short, and whoever cannot get the lock now comes again.
create function {schema}.guard_holds(p_worker text, p_guard text, p_silent_s double precision) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '1s'
as $body$
declare
    v_state text;
begin
    select w.state into v_state from {schema}.workers w where w.id = p_worker for no key update;
    -- A worker of whom nothing is left is as dead as can be.
    v_state := coalesce(v_state, 'dead');
    return case p_guard
        when 'none' then true
        when 'dead' then v_state in ('dead', 'stopped')
        when 'suspect' then v_state = 'suspect'
        when 'silent' then coalesce((select v.silent_s >= p_silent_s from {schema}.vitals v where v.worker_id = p_worker), true)
        else false
    end;
exception when lock_not_available then
    return false;
end
$body$;

-- Write SUSPECT or DEAD, if the guard still holds.
create function {schema}.condemn(
    p_worker text, p_verdict jsonb, p_guard text, p_silent_s double precision, p_message text)
returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_now timestamptz;
    v_state text := p_verdict ->> 'state';
begin
    if v_state not in ('suspect', 'dead') or not {schema}.guard_holds(p_worker, p_guard, p_silent_s) then
        return false;
    end if;
    v_now := clock_timestamp();
    update {schema}.workers w set
        state = v_state,
        verdict = p_verdict,
        suspect_at = case when v_state = 'suspect' then v_now end,
        stopped_at = case when v_state = 'dead' then v_now end
    where w.id = p_worker
      and (w.state in ('active', 'draining') or (w.state = 'suspect' and v_state = 'dead'));
    if not found then
        return false;
    end if;
    insert into {schema}.events (at, kind, worker_id, message) values (v_now, 'worker_' || v_state, p_worker, p_message);
    return true;
end
$body$;

-- End attempts of somebody else, if the guard still holds; gives what was written.
create function {schema}.settle(
    p_worker text, p_endings jsonb, p_releases jsonb, p_guard text, p_silent_s double precision)
returns table (job_id bigint, token bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
#variable_conflict use_column
begin
    -- The word of the kernel or of an operator needs no look at the worker: the token alone is the fence.
    if p_guard <> 'none' and not {schema}.guard_holds(p_worker, p_guard, p_silent_s) then
        return;
    end if;
    if p_endings is not null then
        return query select e.job_id, e.token from {schema}.apply_endings(p_worker, p_endings, false) e where e.written;
    end if;
    if p_releases is not null then
        return query select e.job_id, e.token from {schema}.apply_endings(p_worker, p_releases, false) e where e.written;
    end if;
end
$body$;

-- The identity of this run of this server: system identifier, timeline, start of the postmaster. A session proves
-- something only while this is the same as when the session was registered: after a failover, a promotion, a restart or
-- a restore it differs. `_INCARNATION` in connecting.py computes the same text before there are any tables.
create function {schema}.incarnation() returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
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
