-- What people and the rules read. All of it is read-only.

-- How much of the time after this was watched: time in which nobody could write does not age a lease.
create function {schema}.watched_s(p_since timestamptz) returns double precision
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
    select coalesce(sum(extract(epoch from p.until - greatest(p.since, p_since))), 0)::double precision
    from {schema}.watch_periods p where p.until > p_since
$body$;

-- `counted_s` is the silence that counts against a worker. `silent_s` is for people: as if the watch went on until now.
create view {schema}.vitals as
select w.id as worker_id, w.state, w.host, w.suspect_after_s, w.running_stale_after_s,
       b.beat_at, b.running, b.processed, b.session_pid, b.session_start,
       c.counted_s
           + greatest(0, extract(epoch from clock_timestamp() - greatest(b.beat_at, p.until)))::double precision as silent_s,
       c.counted_s
from {schema}.workers w
join {schema}.beats b on b.worker_id = w.id
left join lateral (select l.since, l.until from {schema}.watch_periods l order by l.id desc limit 1) p on true
cross join lateral (
    -- Nearly everybody was heard in the current period.
    select case when b.beat_at >= p.since then greatest(0, extract(epoch from p.until - b.beat_at))::double precision
                else {schema}.watched_s(b.beat_at) end as counted_s
) c;

-- Every job in somebody's hands, with what the rules need to judge it.
create view {schema}.held_jobs as
select j.id as job_id, j.token, j.worker_id, j.state, j.task, j.queue, coalesce(j.policy, ''::bytea) as policy,
       j.failures, j.crash_count as crashes, coalesce(j.cancel_requested, false) as cancel_requested, j.timeout_s,
       case when coalesce(j.heartbeat, true) then coalesce(j.heartbeat_timeout_s, v.running_stale_after_s) end
           as heartbeat_timeout_s,
       extract(epoch from clock_timestamp() - j.claimed_at)::double precision as held_s,
       coalesce(extract(epoch from clock_timestamp() - j.started_at), 0)::double precision as running_s,
       coalesce(v.silent_s, 'infinity'::double precision) as silent_s,
       coalesce(v.state, 'dead') as worker_state
from {schema}.jobs j
left join {schema}.vitals v on v.worker_id = j.worker_id
where j.held;

-- All attempts, oldest first by token within a job; beats do not rewrite attempts, so the deadlines are computed.
create view {schema}.attempt_status as
select a.job_id, a.token, a.worker_id, a.state, a.claimed_at, a.started_at, a.ended_at, a.code, a.cause,
       a.last_heartbeat_at, null::timestamptz as heartbeat_deadline,
       a.started_at + make_interval(secs => j.timeout_s) as deadline
from {schema}.attempts a
join {schema}.jobs j on j.id = a.job_id
union all
select j.id, j.token, j.worker_id, coalesce(j.ended_as, j.state), j.claimed_at, j.started_at, j.finished_at,
       case when j.finished_at is not null then j.error_code end,
       case when j.finished_at is not null then coalesce(j.error_cause, j.error_message) end,
       least(b.beat_at, j.finished_at),
       case when j.held and coalesce(j.heartbeat, true) then b.beat_at + make_interval(secs =>
           case when j.state = 'running' then coalesce(j.heartbeat_timeout_s, w.running_stale_after_s)
                else w.suspect_after_s end) end,
       j.started_at + make_interval(secs => j.timeout_s)
from {schema}.jobs j
left join {schema}.workers w on w.id = j.worker_id
left join {schema}.beats b on b.worker_id = j.worker_id
where j.token is not null;

create view {schema}.worker_status as
select v.worker_id, v.state as status, v.beat_at as last_seen_at,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = v.worker_id) as active_tasks,
       round(extract(epoch from clock_timestamp() - v.beat_at) / 60, 2) as minutes_since_heartbeat
from {schema}.vitals v;

-- One row per held job, derived from the beat of its holder: no table grows by heartbeats.
create view {schema}.heartbeats as
select j.token as id, j.id as task_id, j.worker_id as sender_id,
       case j.state when 'claimed' then 'claimer' else 'runner' end as role,
       b.beat_at as sent_at, w.host as hostname, w.pid
from {schema}.jobs j
join {schema}.workers w on w.id = j.worker_id
join {schema}.beats b on b.worker_id = j.worker_id
where j.held;
