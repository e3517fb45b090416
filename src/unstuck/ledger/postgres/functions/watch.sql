-- What a reaper sees of the workers and of jobs that run too long, once per round of each ledger.

-- Whether a session that was lost may be unable to come back, because no connection is left for it: then its absence
-- proves nothing. A few are kept free for those that come and go.
create or replace function {schema}.connections_run_out() returns boolean
language sql stable
{fixed_path}
as $body$
    with open as (
        select a.datid, a.usesysid from pg_stat_get_activity(null) a where a.datid is not null
    ), limited as (
        -- Every role that a worker may have: perhaps another one than that of the reaper.
        select r.rolconnlimit, count(*) as sessions
        from open o join pg_roles r on r.oid = o.usesysid
        where r.rolconnlimit >= 0 and not r.rolsuper and has_table_privilege(r.oid, '{schema}.worker_heartbeats'::regclass, 'update')
        group by r.oid, r.rolconnlimit
    ), here as (
        select d.oid, d.datconnlimit, d.datallowconn from pg_database d where d.datname = current_database()
    )
    select (select count(*) from open) + 3 >= current_setting('max_connections')::bigint
               - current_setting('superuser_reserved_connections')::bigint
               - coalesce(current_setting('reserved_connections', true)::bigint, 0)
        or exists (select 1 from limited r where r.sessions + 1 >= r.rolconnlimit)
        or exists (select 1 from here h where not h.datallowconn or h.datconnlimit >= 0
                   and (select count(*) from open o where o.datid = h.oid) + 1 >= h.datconnlimit)
$body$;

-- How many sessions of this database were terminated at the server (`pg_terminate_backend`). Those whose client died or was
-- cut off are counted elsewhere. The server counts a session before it takes it out of the list of sessions.
create or replace function {schema}.sessions_terminated() returns bigint
language sql volatile
{fixed_path}
as $body$
    select coalesce(pg_stat_get_db_sessions_killed(d.oid), 0) from pg_database d where d.datname = current_database()
$body$;

-- What a reaper sees of workers: all that live, and the dead and stopped that still hold jobs. With `p_host` only
-- those that have a process there: a worker that comes over a network may name any host as its own, and is on none.
--
-- With `p_worth_judging` without the remote workers that were heard within every timeout that concerns them. Of these the
-- last row gives the number, in `held`: a reaper that judges by silence alone need not look at each of ten thousand. What
-- is held is gathered in one walk over it, and not for each worker again.
--
-- A session is present or missing only if the server lets us see it, and if it is a session of this run of this server.
-- What a missing one proves is decided in domain/liveness.py, by `sessions_doubted_s`: how long ago it was last in doubt
-- why sessions are missing.
create or replace function {schema}.watch_v1(p_host text, p_worth_judging boolean)
returns table (
    id text, name text, host text, pid integer, boot_id text, pid_namespace text, process_started text, status_page text,
    state text, silent_s double precision, suspect_after_s double precision, waits_for_s double precision, held bigint,
    session text, suspect_s double precision, shortest_s double precision, transport text, since_beat_s double precision,
    heartbeat_interval_s double precision, suspected_by text, session_idle_s double precision, recovery text,
    sessions_doubted_s double precision)
language plpgsql volatile
{plain_index_scans}
-- Hashed and not looked up one by one, whatever the statistics say of a young table.
set enable_nestloop = off
as $body$
#variable_conflict use_column
declare
    v_server text := {schema}.incarnation();
    v_now timestamptz := clock_timestamp();
    v_doubted_s double precision;
    v_since timestamptz;
    v_until timestamptz;
    v_living bigint;
begin
    select p.since, p.until into v_since, v_until from {schema}.watch_periods p order by p.id desc limit 1;
    -- The first of these takes the list of sessions that is used below, so a session that is not in it has been counted.
    select case when {schema}.connections_run_out() or {schema}.sessions_terminated() <> l.sessions_terminated then 0
                else extract(epoch from v_now - l.sessions_doubted_at) end
    into v_doubted_s from {schema}.ledger l;
    return query
    with in_hand as materialized (
        select j.worker_id, count(*) as held,
               max(j.heartbeat_timeout_s) filter (where j.state = 'running' and coalesce(j.heartbeat, true)) as longest_s,
               min(j.heartbeat_timeout_s) filter (where j.state = 'running' and coalesce(j.heartbeat, true)) as shortest_s,
               bool_or(j.state = 'running' and coalesce(j.heartbeat, true) and j.heartbeat_timeout_s is null) as usual,
               bool_or(j.state = 'running' and not coalesce(j.heartbeat, true)) as for_ever
        from {schema}.jobs j where j.held group by j.worker_id
    ), known as (
        select w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.status_page, w.state,
               -- Nearly everybody was heard in the current period.
               case when b.beat_at >= v_since then greatest(0, extract(epoch from v_until - b.beat_at))::double precision
                    else {schema}.watched_s(b.beat_at) end as silent_s,
               w.suspect_after_s,
               case when h.for_ever then 'infinity'
                    else greatest(h.longest_s, case when h.usual then w.running_stale_after_s end) end as waits_for_s,
               coalesce(h.held, 0) as held, b.session_pid, b.session_start, b.session_server,
               -- Watched time, as all that is held against a worker: a step of the clock is no grace that ran out.
               coalesce({schema}.watched_s(w.suspect_at), 0) as suspect_s,
               least(h.shortest_s, case when h.usual then w.running_stale_after_s end) as shortest_s, w.transport,
               extract(epoch from v_now - b.beat_at)::double precision as since_beat_s, w.heartbeat_interval_s,
               w.verdict ->> 'detector' as suspected_by, w.recovery
        from {schema}.workers w
        join {schema}.worker_heartbeats b on b.worker_id = w.id
        left join in_hand h on h.worker_id = w.id
        where (w.state in ('active', 'draining', 'suspect') or h.held > 0)
          and (p_host is null or (w.host = p_host and w.transport = 'python'))
    ), looked_at as (
        select k.* from known k
        where not p_worth_judging or k.transport = 'python' or k.state in ('dead', 'stopped', 'suspect')
           or k.since_beat_s >= least(k.suspect_after_s, k.shortest_s)
    ), seen as materialized (
        select a.pid, a.backend_start, a.state_change from pg_stat_get_activity(null) a
        where exists (select 1 from looked_at l where l.session_pid is not null)
    )
    select l.id, l.name, l.host, l.pid, l.boot_id, l.pid_namespace, l.process_started, l.status_page, l.state, l.silent_s,
           l.suspect_after_s, l.waits_for_s, l.held,
           case when l.session_pid is null or l.session_server is distinct from v_server then 'unknown'
                when s.backend_start = l.session_start then 'present'
                when s.pid is not null and s.backend_start is null then 'unknown'
                else 'missing' end,
           l.suspect_s, l.shortest_s, l.transport, l.since_beat_s, l.heartbeat_interval_s, l.suspected_by,
           case when s.backend_start = l.session_start
                then greatest(0, extract(epoch from v_now - s.state_change))::double precision end,
           l.recovery, v_doubted_s
    from looked_at l
    left join seen s on s.pid = l.session_pid
    order by l.id;
    if p_worth_judging then
        select count(*) into v_living from {schema}.workers w where w.state in ('active', 'draining', 'suspect');
        held := v_living;
        return next;
    end if;
end
$body$;

-- Who runs past its hard deadline, and by how much more than it is given to end by itself. Asked for in every pass of a
-- reaper: without statistics, as in a new database, half of all jobs would be taken for held and the whole table read.
create or replace function {schema}.overdue_v1(p_grace_s double precision, p_lost_grace_s double precision, p_limit integer)
returns setof {schema}.held_jobs
language sql volatile
{index_scans}
set jit = off
as $body$
    select h.* from {schema}.held_jobs h
    where h.state = 'running' and h.timeout_s is not null
      -- Only watched time: a worker that could not be heard, or a clock that was set forward, is not past any deadline.
      and least(h.running_s, {schema}.watched_s(clock_timestamp() - make_interval(secs => h.running_s))) > h.timeout_s
          + case when h.worker_state in ('active', 'draining') then p_grace_s else p_lost_grace_s end
      -- Its code has ended: it is not late, its outcome only waits for a lock. If its worker dies, it is lost with it.
      and not (h.deferred and h.worker_state in ('active', 'draining', 'suspect'))
    order by h.job_id
    limit p_limit
$body$;
