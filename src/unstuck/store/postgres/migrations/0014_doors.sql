-- Workers that come through another door than Python's own: over HTTP or ZeroMQ, in any language.

alter table {schema}.workers
    add column door text not null default 'python' constraint door_known check (door in ('python', 'http', 'mdp')),
    -- The token that it came with: nobody else may speak for it.
    add column owner text;

-- A name is only a name, but a beat may come with nothing else: it must lead to one living worker.
create unique index workers_living_name on {schema}.workers (name)
    where door <> 'python' and state in ('active', 'draining', 'suspect');
create index workers_by_name on {schema}.workers (name, created_at) where door <> 'python';

-- As `beat` (0007), for many at once. The identity rows are locked in the order of their ids, as everybody who locks
-- several does.
create function {schema}.beat_foreign_v1(p_workers text[], p_running bigint[], p_settled bigint[], p_metadata text[])
returns table (
    n bigint, state text, was_suspect boolean, request text, cancel_ids bigint[], cancel_tokens bigint[],
    disabled boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_one record;
    v_worker record;
    v_cancels boolean;
    v_strong boolean;
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
                       select 1 from {schema}.hosts h where h.name = w.host and h.disabled is not null) as off
            into v_worker
            from {schema}.workers w where w.id = v_one.id and w.door <> 'python' for no key update of w;
        else
            -- The share lock stands against a verdict: one of the two comes first, and the other sees it.
            select w.state, w.request, w.draining,
                   w.disabled is not null or exists (
                       select 1 from {schema}.hosts h where h.name = w.host and h.disabled is not null) as off
            into v_worker
            from {schema}.workers w where w.id = v_one.id and w.door <> 'python' for share of w;
        end if;
        if not found or v_worker.state in ('dead', 'stopped') then
            state := coalesce(v_worker.state, 'dead');
            return next;
            continue;
        end if;
        v_now := clock_timestamp();
        update {schema}.beats b set
            beat_at = v_now, running = coalesce(nullif(v_one.running, -1), b.running),
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
                update {schema}.beats b set cancels = false where b.worker_id = v_one.id;
            end if;
        end if;
        state := v_worker.state;
        was_suspect := v_worker.state = 'suspect';
        request := v_worker.request;
        disabled := v_worker.off;
        if was_suspect or v_one.metadata is not null then
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
