-- Statements of the reaper.

-- name: take_ticket
-- The row is its own lock and runs out by itself. A time far ahead comes from a clock that was set back: taken too.
insert into {schema}.tickets as t (name, until)
values (%(name)s, clock_timestamp() + make_interval(secs => %(ttl_s)s))
on conflict (name) do update set until = excluded.until
where t.until <= clock_timestamp() or t.until > clock_timestamp() + make_interval(secs => 2 * %(ttl_s)s)
returning 1 as taken;

-- name: tick
select won, stale_s, watched_s, began, gap_s, set_back_s, at
from {schema}.tick_v1(
    %(claim_s)s, %(every_s)s, %(slack_s)s, %(cause)s, %(ticket)s, %(ttl_s)s, %(since_s)s, %(seen_at)s);

-- name: watch
select id, name, host, pid, boot_id, pid_namespace, process_started, status_page, state, silent_s, suspect_after_s,
       waits_for_s, held, session, suspect_s, shortest_s, transport, since_beat_s, heartbeat_interval_s, suspected_by,
       session_idle_s, recovery, sessions_doubted_s,
       (select b.session_pid || '/' || extract(epoch from b.session_start) from {schema}.worker_heartbeats b where b.worker_id = w.id),
       (select k.verdict ->> 'session' from {schema}.workers k where k.id = w.id)
from {schema}.watch_v1(%(host)s, false) w;

-- name: recovery_rules
select distinct recovery from {schema}.workers where transport = 'python' and recovery is not null;

-- name: ring_of
select id, name, host, pid, boot_id, pid_namespace, process_started, status_page, state, silent_s, suspect_after_s,
       waits_for_s, held, session, suspect_s, shortest_s, transport, since_beat_s, heartbeat_interval_s, suspected_by,
       session_idle_s, recovery, null::double precision as sessions_doubted_s,
       null as session_id, null as suspected_session
from {schema}.ring_of_v1(%(worker_id)s, %(host)s, %(size)s);

-- name: to_judge
select id, name, host, pid, boot_id, pid_namespace, process_started, status_page, state, silent_s, suspect_after_s,
       waits_for_s, held, session, suspect_s, shortest_s, transport, since_beat_s, heartbeat_interval_s, suspected_by,
       session_idle_s, recovery, sessions_doubted_s,
       (select b.session_pid || '/' || extract(epoch from b.session_start) from {schema}.worker_heartbeats b where b.worker_id = w.id),
       (select k.verdict ->> 'session' from {schema}.workers k where k.id = w.id)
from {schema}.watch_v1(null, true) w;

-- name: condemn
select {schema}.condemn_v1(%(worker_id)s, %(verdict)s::jsonb, %(guard)s, %(silent_s)s, %(message)s);

-- name: amend
-- The dead do not change: whoever knows more of how one ended may add to it at any time.
update {schema}.workers set verdict = %(verdict)s::jsonb where id = %(worker_id)s and state = 'dead' returning id;

-- name: settle
select job_id, token, woken from {schema}.settle_v1(%(worker_id)s, %(endings)s, %(releases)s, %(guard)s, %(silent_s)s);

-- name: overdue
select job_id, token, worker_id, state, task, queue, policy, failures, crashes, cancel_requested, timeout_s,
       heartbeat_timeout_s, held_s, running_s, silent_s, suspected_crashes, deferred
from {schema}.overdue_v1(%(grace_s)s, %(lost_grace_s)s, %(limit)s);

-- name: add_last_words
-- Only to reports that say that this is missing.
update {schema}.autopsies a set body = (a.body || w.said) - 'missing'
from unnest(%(job_ids)s::bigint[], %(tokens)s::bigint[], %(said)s::jsonb[]) as w(job_id, token, said)
where a.job_id = w.job_id and a.token = w.token and a.body ? 'missing'
returning a.job_id;

-- name: stale
select h.job_id, h.token, h.worker_id, h.state, h.task, h.queue, h.policy, h.failures, h.crashes, h.cancel_requested,
       h.timeout_s, h.heartbeat_timeout_s, h.held_s, h.running_s, h.silent_s, h.suspected_crashes, h.deferred
from {schema}.held_jobs h
join {schema}.jobs j on j.id = h.job_id
where h.worker_state in ('dead', 'stopped') or h.silent_s >= %(older_than_s)s
order by j.claimed_at, h.token;

-- name: promote_due
select queue, count from {schema}.promote_due_v1(%(limit)s);

-- name: next_due
select least(
    (select greatest(0, extract(epoch from run_at - clock_timestamp()))::double precision
     from {schema}.jobs where scheduled order by run_at limit 1),
    {schema}.postponed_in_s_v1());

-- name: follow_clock
select {schema}.follow_clock_v1(%(limit)s);

-- name: sweep_old
select j.removed, {schema}.sweep_events_v1(%(events_s)s, %(limit)s), {schema}.sweep_workers_v1(%(workers_s)s, %(limit)s), j.more
from {schema}.sweep_jobs_v1(%(jobs_s)s, %(limit)s) j;

-- name: prune_batch
select next_after, removed from {schema}.prune_batch_v1(%(after)s, %(older_than_s)s, %(states)s, %(look)s);

-- name: ledger_id
select id from {schema}.ledger;

-- name: sweep_moved_events
-- A dump brought transactions that this server has not reached yet: once it does, they would look new.
with moved as (
    update {schema}.events set transaction_id = '0'
    where id in (
        select id from {schema}.events where transaction_id >= pg_snapshot_xmax(pg_current_snapshot())
        order by transaction_id, id limit %(limit)s
    )
    returning 1
)
select count(*) from moved;

-- name: void_tokens
select {schema}.void_tokens_v1();
