-- Proofs of life, and the verdicts on those who give none.

-- Push the deadline of a worker forward: one narrow row, HOT, never an insert.
create function {schema}.beat_v1(
    p_worker text, p_running integer, p_processed bigint, p_metadata jsonb,
    p_session_pid integer, p_session_start timestamptz, p_session_server text)
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
    select w.state, w.draining, w.request into v_worker
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

    cancel_ids := null;
    cancel_tokens := null;
    if v_last.cancels then
        select array_agg(j.id), array_agg(j.token) into cancel_ids, cancel_tokens
        from {schema}.jobs j
        where j.held and j.worker_id = p_worker and j.state = 'running' and j.cancel_requested;
    end if;
    update {schema}.beats set
        beat_at = v_now, running = p_running, processed = p_processed,
        session_pid = p_session_pid, session_start = p_session_start, session_server = p_session_server,
        cancels = cancel_ids is not null
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
        -- The crash of a server that forgets it begins a new watch period, in which the worker is heard again in time: it need
        -- not wait for the disk.
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
        when 'silent' then coalesce((select v.counted_s >= p_silent_s from {schema}.vitals v where v.worker_id = p_worker), true)
        when 'unheard' then coalesce((select v.silent_s >= p_silent_s from {schema}.vitals v where v.worker_id = p_worker), true)
        else false
    end;
exception when lock_not_available then
    return false;
end
$body$;

-- Write SUSPECT or DEAD, if the guard still holds.
create function {schema}.condemn_v1(
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
create function {schema}.settle_v1(
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

-- After a promotion: the lost primary may have given out numbers of jobs and attempts in transactions that were never
-- replicated. Those belong to nobody else, so the sequences skip more than can be lost that way (`RUN_OF_IDS`). Every
-- connection of ours asks before it does anything else. Behind a pooler, where a connection outlives a promotion, ticks ask.
create function {schema}.skip_lost_numbers_v1() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    c_skipped constant bigint := 1000000000;
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
            perform setval(v_sequence, nextval(v_sequence) + c_skipped);
        end loop;
        update {schema}.ledger set numbered_on = v_timeline where one;
    end if;
end
$body$;

-- Extend the watch over the workers to now, or begin a new watch period. The rule is `advance` of domain/watch.py. The row
-- of `ledger` serialises ticks and is never waited for: whoever has it keeps the watch for everybody.
create function {schema}.tick_v1(
    p_claim_s double precision, p_every_s double precision, p_slack_s double precision, p_cause text,
    p_ticket text, p_ttl_s double precision)
returns table (
    won boolean, stale_s double precision, watched_s double precision, began text, gap_s double precision,
    set_back_s double precision)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    c_step_back constant interval := '0.1 seconds';
    c_fresh_intervals constant double precision := 2;
    c_fresh_s constant double precision := 1;
    -- A reaper that just started vouches for nothing, so it leaves the watch to others a little longer.
    v_fresh_s double precision := greatest(c_fresh_intervals * p_every_s, case when p_claim_s is null then c_fresh_s end);
    c_max_periods constant bigint := 200;
    c_most_periods constant bigint := 2000;
    v_now timestamptz := clock_timestamp();
    v_server text := {schema}.incarnation();
    v_known text;
    v_last {schema}.watch_periods;
    v_stale_s double precision;
    v_step interval;
begin
    won := p_ticket is null;
    if p_ticket is not null then
        insert into {schema}.tickets as t (name, until) values (p_ticket, v_now + make_interval(secs => p_ttl_s))
        on conflict (name) do update set until = excluded.until
        where t.until <= v_now or t.until > v_now + make_interval(secs => 2 * p_ttl_s)
        returning true into won;
        won := coalesce(won, false);
    end if;
    set_back_s := 0;
    select p.* into v_last from {schema}.watch_periods p order by p.id desc limit 1;
    v_stale_s := extract(epoch from v_now - v_last.until);
    if not won and v_stale_s >= 0 and v_stale_s <= p_every_s then
        -- Others keep the watch, and most ask in vain.
        stale_s := v_stale_s;
        watched_s := extract(epoch from v_last.until - v_last.since);
        return next;
        return;
    end if;

    select l.server into v_known from {schema}.ledger l for no key update skip locked;
    if not found then
        -- Whoever has the row may fail to commit, so no one takes its word for time that was not watched.
        stale_s := case when v_stale_s <= greatest(p_claim_s + p_slack_s, v_fresh_s)
                        then greatest(0, v_stale_s) else 0 end;
        watched_s := coalesce(extract(epoch from v_last.until - v_last.since), 0);
        return next;
        return;
    end if;
    -- Read again behind the lock: somebody may have begun a period meanwhile.
    select p.* into v_last from {schema}.watch_periods p order by p.id desc limit 1;
    v_now := clock_timestamp();
    v_stale_s := extract(epoch from v_now - v_last.until);
    perform set_config('synchronous_commit', 'off', true);
    if v_known is distinct from v_server then
        update {schema}.ledger set server = v_server where one;
        perform {schema}.skip_lost_numbers_v1();
    end if;

    if v_last.id is null then
        began := coalesce(p_cause, 'start');
    elsif v_now < v_last.until - c_step_back then
        -- Whatever lies in the future was written before the clock was set back.
        set_back_s := -v_stale_s;
        v_step := make_interval(secs => set_back_s);
        update {schema}.watch_periods p set
            since = p.since - v_step, until = p.until - v_step, set_back_at = p.set_back_at - v_step
        where p.until > v_now;
        update {schema}.watch_periods p set set_back_s = -v_stale_s, set_back_at = v_now where p.id = v_last.id;
        update {schema}.beats b set beat_at = least(b.beat_at - v_step, v_now) where b.beat_at > v_now;
        v_last.since := v_last.since - v_step;
        v_last.until := v_now;
        -- If more happened than that, no one knows how long it took.
        began := case when v_known <> v_server then 'failover' else p_cause end;
    elsif v_known is not null and v_known <> v_server then
        began := 'failover';
    elsif v_stale_s <= p_claim_s + p_slack_s then
        update {schema}.watch_periods p set until = greatest(p.until, v_now) where p.id = v_last.id;
    elsif v_stale_s <= v_fresh_s then
        stale_s := v_stale_s;
    elsif p_claim_s is null then
        began := coalesce(p_cause, 'start');
    else
        began := coalesce(p_cause, 'clock');
    end if;
    if began is not null then
        -- A claim reaches back only as far as the server and its clock did: it knows nothing of another one's time.
        v_last.since := v_now - make_interval(
            secs => case when began = 'failover' or set_back_s > 0 then 0 else coalesce(p_claim_s, 0) end);
        gap_s := extract(epoch from v_last.since - v_last.until);
        insert into {schema}.watch_periods (since, until, cause, gap_s) values (v_last.since, v_now, began, gap_s);
        -- Those in which a living worker was silent count against it, so they stay.
        delete from {schema}.watch_periods p
        where p.id <= (select max(m.id) from {schema}.watch_periods m) - c_max_periods
          and (p.id <= (select max(m.id) from {schema}.watch_periods m) - c_most_periods
               or not exists (select 1 from {schema}.workers w join {schema}.beats b on b.worker_id = w.id
                              where w.state in ('active', 'draining', 'suspect') and b.beat_at < p.until));
    end if;
    if began is not null and set_back_s = 0 then
        -- The clock may have been ahead for a while that no reaper saw. Heartbeats of this moment are no sign of that.
        update {schema}.beats b set beat_at = v_now where b.beat_at > v_now + interval '1 second';
    end if;
    stale_s := coalesce(stale_s, 0);
    watched_s := extract(epoch from v_now - v_last.since) - stale_s;
    return next;
end
$body$;
