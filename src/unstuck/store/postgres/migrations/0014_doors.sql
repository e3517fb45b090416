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
-- several does. There is no amnesty: that one of these is late may be its own doing, or its network's.
create function {schema}.beat_foreign(p_workers text[], p_running bigint[], p_settled bigint[], p_metadata text[])
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
    v_now timestamptz;
begin
    -- A beat that a crash of the server forgets is forgiven by its restart: it need not wait for the disk.
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
        if v_one.metadata is not null
           or exists (select 1 from {schema}.workers w where w.id = v_one.id and w.state = 'suspect') then
            perform 1 from {schema}.workers w where w.id = v_one.id for no key update;
        end if;
        select w.state, w.request, w.draining,
               w.disabled is not null or exists (
                   select 1 from {schema}.hosts h where h.name = w.host and h.disabled is not null) as off
        into v_worker
        from {schema}.workers w where w.id = v_one.id and w.door <> 'python' for share of w;
        if not found or v_worker.state in ('dead', 'stopped') then
            state := coalesce(v_worker.state, 'dead');
            return next;
            continue;
        end if;
        select b.cancels into v_cancels from {schema}.beats b where b.worker_id = v_one.id for update;
        if not found then
            return next;
            continue;
        end if;
        if v_cancels then
            select array_agg(j.id), array_agg(j.token) into cancel_ids, cancel_tokens
            from {schema}.jobs j
            where j.held and j.worker_id = v_one.id and j.state = 'running' and j.cancel_requested;
        end if;
        v_now := clock_timestamp();
        update {schema}.beats b set
            beat_at = v_now, running = coalesce(nullif(v_one.running, -1), b.running),
            processed = b.processed + v_one.settled,
            session_pid = null, session_start = null, cancels = cancel_ids is not null
        where b.worker_id = v_one.id;
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

-- As in 0008, and through which door each came. Whoever asks for one host asks about the processes on it: a worker that
-- comes over a network may name any host as its own, and is none of them.
drop function {schema}.watch(text, text, integer);
create function {schema}.watch(p_host text, p_after text, p_size integer)
returns table (
    id text, name text, host text, pid integer, boot_id text, pid_namespace text, process_started text, trace text,
    state text, silent_s double precision, suspect_after_s double precision, waits_for_s double precision, held bigint,
    session text, suspect_s double precision, shortest_s double precision, door text)
language sql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $body$
with seen as materialized (
    select a.pid, a.backend_start from pg_stat_get_activity(null) a where p_after is null
)
select w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.trace, w.state, v.silent_s,
       w.suspect_after_s, h.waits_for_s, h.held,
       case when v.session_pid is null or p_after is not null then 'unknown'
            when pg_postmaster_start_time() > v.session_start then 'unknown'
            when s.pid is null then 'missing'
            when s.backend_start is null then 'unknown'
            when s.backend_start = v.session_start then 'present'
            else 'missing' end,
       coalesce(extract(epoch from clock_timestamp() - w.suspect_at), 0)::double precision, h.shortest_s, w.door
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
left join seen s on s.pid = v.session_pid
cross join lateral (
    select count(*) as held,
           max(t.timeout_s) as waits_for_s,
           min(t.timeout_s) filter (where t.timeout_s < 'infinity') as shortest_s
    from {schema}.jobs j
    cross join lateral (
        select case when j.state <> 'running' then null
                    when not coalesce(j.heartbeat, true) then 'infinity'
                    else coalesce(j.heartbeat_timeout_s, w.running_stale_after_s) end as timeout_s
    ) t
    where j.held and j.worker_id = w.id
) h
where (p_host is null or (w.host = p_host and w.door = 'python'))
  and (w.state in ('active', 'draining', 'suspect') or (h.held > 0 and p_after is null))
  and (p_after is null or w.id <> p_after)
order by coalesce(w.id < p_after, false), w.id
limit p_size
$body$;

-- As `watch` of all, without the foreign workers that were heard within every timeout that concerns them. Of these the
-- last row gives the number, in `held`: whoever judges by silence alone need not look at each of ten thousand. What is
-- held is gathered in one walk over it, and not for each worker again.
create function {schema}.to_judge()
returns table (
    id text, name text, host text, pid integer, boot_id text, pid_namespace text, process_started text, trace text,
    state text, silent_s double precision, suspect_after_s double precision, waits_for_s double precision, held bigint,
    session text, suspect_s double precision, shortest_s double precision, door text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
-- Hashed and not looked up one by one, whatever the statistics say of a young table.
set enable_nestloop = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_started timestamptz := pg_postmaster_start_time();
    v_forgiven timestamptz := greatest(v_started, (select l.amnesty_at from {schema}.ledger l));
    v_now timestamptz := clock_timestamp();
    v_living bigint;
begin
    return query
    with in_hand as materialized (
        select j.worker_id, count(*) as held,
               max(j.heartbeat_timeout_s) filter (where j.state = 'running' and coalesce(j.heartbeat, true)) as longest_s,
               min(j.heartbeat_timeout_s) filter (where j.state = 'running' and coalesce(j.heartbeat, true)) as shortest_s,
               bool_or(j.state = 'running' and coalesce(j.heartbeat, true) and j.heartbeat_timeout_s is null) as usual,
               bool_or(j.state = 'running' and not coalesce(j.heartbeat, true)) as for_ever
        from {schema}.jobs j where j.held group by j.worker_id
    ), known as (
        select w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.trace, w.state,
               greatest(0, extract(epoch from v_now - greatest(b.beat_at, v_forgiven)))::double precision as silent_s,
               w.suspect_after_s,
               case when h.for_ever then 'infinity'
                    else greatest(h.longest_s, case when h.usual then w.running_stale_after_s end) end as waits_for_s,
               coalesce(h.held, 0) as held, b.session_pid, b.session_start,
               coalesce(extract(epoch from v_now - w.suspect_at), 0)::double precision as suspect_s,
               least(h.shortest_s, case when h.usual then w.running_stale_after_s end) as shortest_s, w.door
        from {schema}.workers w
        join {schema}.beats b on b.worker_id = w.id
        left join in_hand h on h.worker_id = w.id
        where w.state in ('active', 'draining', 'suspect') or h.held > 0
    ), looked_at as (
        select k.* from known k
        where k.door = 'python' or k.state in ('dead', 'stopped', 'suspect')
           or k.silent_s >= least(k.suspect_after_s, k.shortest_s)
    ), seen as materialized (
        select a.pid, a.backend_start from pg_stat_get_activity(null) a
        where exists (select 1 from looked_at l where l.session_pid is not null)
    )
    select l.id, l.name, l.host, l.pid, l.boot_id, l.pid_namespace, l.process_started, l.trace, l.state, l.silent_s,
           l.suspect_after_s, l.waits_for_s, l.held,
           case when l.session_pid is null or v_started > l.session_start then 'unknown'
                when s.pid is null then 'missing'
                when s.backend_start is null then 'unknown'
                when s.backend_start = l.session_start then 'present'
                else 'missing' end,
           l.suspect_s, l.shortest_s, l.door
    from looked_at l
    left join seen s on s.pid = l.session_pid
    order by l.id;
    select count(*) into v_living from {schema}.workers w where w.state in ('active', 'draining', 'suspect');
    held := v_living;
    return next;
end
$body$;
