-- The ring: the living of one host that follow a worker in the order of ids, going round. Every worker asks it with every
-- beat, so it must cost the same in a fleet of a thousand as in one of ten. As a part of `watch_v1` it joined all workers of
-- all hosts, with a plan that was made anew each time: in sum the square of the fleet.

-- Neither sessions nor silence are looked at: a process that holds a neighbour's pidfd has the kernel's word.
create or replace function {schema}.ring_of_v1(p_after text, p_host text, p_size integer)
returns table (
    id text, name text, host text, pid integer, boot_id text, pid_namespace text, process_started text, status_page text,
    state text, silent_s double precision, suspect_after_s double precision, waits_for_s double precision, held bigint,
    session text, suspect_s double precision, shortest_s double precision, transport text, since_beat_s double precision,
    heartbeat_interval_s double precision, suspected_by text, session_idle_s double precision, recovery text)
language plpgsql volatile
{plain_index_scans}
set plan_cache_mode = force_generic_plan
as $body$
begin
    return query
    with following as (
        (select f.id as worker_id, 1 as lap from {schema}.workers f
         where f.host = p_host and f.id > p_after and f.state in ('active', 'draining', 'suspect')
           and f.transport = 'python'
         order by f.id limit p_size)
        union all
        (select f.id, 2 from {schema}.workers f
         where f.host = p_host and f.id < p_after and f.state in ('active', 'draining', 'suspect')
           and f.transport = 'python'
         order by f.id limit p_size)
        order by 2, 1
        limit p_size
    )
    select w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.status_page, w.state,
           0::double precision,
           w.suspect_after_s, h.waits_for_s, h.held, 'unknown',
           coalesce(extract(epoch from clock_timestamp() - w.suspect_at), 0)::double precision, h.shortest_s, w.transport,
           extract(epoch from clock_timestamp() - b.beat_at)::double precision, w.heartbeat_interval_s,
           w.verdict ->> 'detector', null::double precision, w.recovery
    from following f
    join {schema}.workers w on w.id = f.worker_id
    join {schema}.worker_heartbeats b on b.worker_id = f.worker_id
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
    order by f.lap, w.id;
end
$body$;
