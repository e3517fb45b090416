-- Heartbeats of Python workers, and of the workers that come over HTTP and ZeroMQ.

-- Push the deadline of a worker forward: one narrow row, HOT, never an insert.
create or replace function {schema}.beat_v1(
    p_worker text, p_running integer, p_processed bigint, p_metadata jsonb,
    p_session_pid integer, p_session_start timestamptz, p_session_server text)
returns table (state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[])
language plpgsql volatile
{plain_index_scans}
set plan_cache_mode = force_generic_plan
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
    select b.beat_at, b.cancels into v_last from {schema}.worker_heartbeats b where b.worker_id = p_worker for update;
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
    -- Never before the last tick of a reaper: a clock that was set back and that no reaper has seen yet would make it a
    -- heartbeat of long ago.
    update {schema}.worker_heartbeats set
        beat_at = greatest(v_now, (select p.until from {schema}.watch_periods p order by p.id desc limit 1)),
        running = p_running, processed = p_processed,
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

-- As `beat_v1`, for many at once. The identity rows are locked in the order of their ids, as all sessions do that
-- lock several.
create or replace function {schema}.beat_foreign_v1(p_workers text[], p_running bigint[], p_settled bigint[], p_metadata text[])
returns table (
    n bigint, state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[],
    disabled boolean)
language plpgsql volatile
{plain_index_scans}
set plan_cache_mode = force_generic_plan
set lock_timeout = '200ms'
as $body$
#variable_conflict use_column
declare
    v_one record;
    v_worker record;
    v_cancels boolean;
    v_strong boolean;
    v_held boolean;
    v_now timestamptz;
begin
    -- The crash of a server that forgets it begins a new watch period, in which the worker is heard again in time: it need
    -- not wait for the disk.
    perform set_config('synchronous_commit', 'off', true);
    for v_one in
        select u.id, u.running, u.settled, u.metadata, u.place
        from unnest(p_workers, p_running, p_settled, p_metadata) with ordinality
             as u(id, running, settled, metadata, place)
        order by u.id, u.place
    loop
        n := v_one.place;
        state := 'dead';
        was_suspect := false;
        request := null;
        cancel_ids := null;
        cancel_tokens := null;
        disabled := false;
        -- Who will change the row locks it so from the start: to strengthen a lock behind a waiting verdict is a deadlock.
        v_strong := v_one.metadata is not null;
        if not v_strong then
            v_strong := exists (select 1 from {schema}.workers w where w.id = v_one.id and w.state = 'suspect');
        end if;
        if v_strong then
            select w.state, w.request, w.draining,
                   w.disabled is not null or exists (
                       select 1 from {schema}.hosts h where h.name = w.host) as off
            into v_worker
            from {schema}.workers w where w.id = v_one.id and w.transport <> 'python' for no key update of w skip locked;
        else
            -- The share lock stands against a verdict: one of the two comes first, and the other sees it.
            select w.state, w.request, w.draining,
                   w.disabled is not null or exists (
                       select 1 from {schema}.hosts h where h.name = w.host) as off
            into v_worker
            from {schema}.workers w where w.id = v_one.id and w.transport <> 'python' for share of w skip locked;
        end if;
        v_held := false;
        if not found then
            -- A verdict holds the row for moments and is waited for. Whoever holds it for longer must not keep these workers
            -- from their heartbeats: this one beats without the lock, and whatever changes its row waits for the next time.
            begin
                if v_strong then
                    perform 1 from {schema}.workers w where w.id = v_one.id for no key update;
                else
                    perform 1 from {schema}.workers w where w.id = v_one.id for share;
                end if;
            exception when lock_not_available then
                v_held := true;
            end;
            select w.state, w.request, w.draining,
                   w.disabled is not null or exists (
                       select 1 from {schema}.hosts h where h.name = w.host) as off
            into v_worker
            from {schema}.workers w where w.id = v_one.id and w.transport <> 'python';
        end if;
        if not found or v_worker.state in ('dead', 'stopped') then
            state := coalesce(v_worker.state, 'dead');
            return next;
            continue;
        end if;
        v_now := clock_timestamp();
        update {schema}.worker_heartbeats b set
            beat_at = greatest(v_now, (select p.until from {schema}.watch_periods p order by p.id desc limit 1)),
            running = coalesce(nullif(v_one.running, -1), b.running),
            processed = b.processed + v_one.settled, session_pid = null, session_start = null
        where b.worker_id = v_one.id
        returning b.cancels into v_cancels;
        if not found then
            return next;
            continue;
        end if;
        if v_cancels then
            select array_agg(j.id), array_agg(j.token) into cancel_ids, cancel_tokens
            from {schema}.jobs j
            where j.held and j.worker_id = v_one.id and j.state = 'running' and j.cancel_requested;
            if cancel_ids is null then
                update {schema}.worker_heartbeats b set cancels = false where b.worker_id = v_one.id;
            end if;
        end if;
        state := v_worker.state;
        was_suspect := v_worker.state = 'suspect' and not v_held;
        request := v_worker.request;
        disabled := v_worker.off;
        if was_suspect or (v_one.metadata is not null and not v_held) then
            update {schema}.workers w set
                state = case when w.state <> 'suspect' then w.state when w.draining then 'draining' else 'active' end,
                suspect_at = null,
                verdict = case when w.state <> 'suspect' then w.verdict end,
                metadata = coalesce(v_one.metadata::jsonb, w.metadata)
            where w.id = v_one.id
            returning w.state into state;
        end if;
        if was_suspect then
            insert into {schema}.events (at, kind, worker_id, message)
            values (v_now, 'worker_recovered', v_one.id, 'It beat again: it was only slow.');
        end if;
        return next;
    end loop;
end
$body$;

-- As `beat_foreign_v1`, inside a transaction that holds more than beats. That one lets its commit not wait for the
-- disk; what is set in here ends with this function, so the rest of the transaction is as durable as it was.
create or replace function {schema}.beat_foreign_along_v1(p_workers text[], p_running bigint[], p_settled bigint[], p_metadata text[])
returns table (
    n bigint, state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[],
    disabled boolean)
language sql volatile
{fixed_path}
set synchronous_commit = on
as $body$
    select b.n, b.state, b.was_suspect, b.request, b.cancel_ids, b.cancel_tokens, b.disabled
    from {schema}.beat_foreign_v1(p_workers, p_running, p_settled, p_metadata) b
$body$;
