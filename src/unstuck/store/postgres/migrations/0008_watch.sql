-- What the watchman sees of the workers, once per round of each ledger.
--
-- With `p_after`: the living of one host that follow this worker in the order of ids, going round. Without: everybody
-- who lives, or is dead and still holds jobs. A session is present or missing only where the server lets us see it,
-- and not where the server was restarted since it was written down.
--
-- A function for its settings: statistics that are wrong for a moment must not make it compile itself every second.
create function {schema}.watch(p_host text, p_after text, p_size integer)
returns table (
    id text, name text, host text, pid integer, boot_id text, pid_namespace text, process_started text, trace text,
    state text, silent_s double precision, suspect_after_s double precision, waits_for_s double precision, held bigint,
    session text, suspect_s double precision, shortest_s double precision)
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
       coalesce(extract(epoch from clock_timestamp() - w.suspect_at), 0)::double precision, h.shortest_s
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
where (p_host is null or w.host = p_host)
  and (w.state in ('active', 'draining', 'suspect') or (h.held > 0 and p_after is null))
  and (p_after is null or w.id <> p_after)
order by coalesce(w.id < p_after, false), w.id
limit p_size
$body$;
