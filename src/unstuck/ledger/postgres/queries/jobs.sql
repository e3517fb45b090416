-- What clients ask.

-- name: reserve_job_ids
-- Ids are drawn before the insert: an enqueue whose commit is uncertain is repeated with the same ones.
select nextval('{schema}.job_ids'::regclass) from generate_series(1, %(count)s);

-- name: enqueue
-- How long it may wait for a unique key that an open transaction holds is said for this statement alone. Inside a user's
-- transaction (NULL) their own setting stands.
select e.place, e.job_id
from (select set_config('lock_timeout', coalesce(%(lock_timeout)s, current_setting('lock_timeout')), true) as is_set) b
cross join lateral {schema}.enqueue_v1(
    case when b.is_set is not null then %(ids)s::bigint[] end, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s,
    %(policies)s, %(on_crash)s, %(heartbeats)s,
    %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s, %(unique_keys)s, %(enqueued_by)s,
    %(more)s) e;

-- name: outcomes
select id, state, result, error_code, error_message, error_cause, error_details
from {schema}.jobs
where id = any (%(ids)s) and finished_at is not null;

-- name: existing
select id from {schema}.jobs where id = any (%(ids)s);

-- name: ring
-- Alone in its transaction: inside an enqueue it would make commits wait for one another.
select 1 from pg_notify(%(channel)s, %(payload)s);

-- What people ask. Nothing here changes anything.

-- name: job
select id, task, queue, state, -rank, payload, coalesce(payload_type, 'json'), result, error_code, error_message,
       error_cause, error_details, coalesce(policy, ''::bytea), failures, crash_count, attempt, unique_key,
       coalesce(cancel_requested, false), extract(epoch from enqueued_at)::double precision, enqueued_by,
       extract(epoch from coalesce(run_at, enqueued_at))::double precision,
       extract(epoch from claimed_at)::double precision, extract(epoch from started_at)::double precision,
       extract(epoch from finished_at)::double precision, worker_id, token, coalesce(suspected_crashes, 0),
       coalesce(run_alone, false), awaits_signal, awaits_signal is null or scheduled
from {schema}.jobs
where id = %(job_id)s;

-- name: jobs
-- Planned with its values, so that conditions that were not asked for are gone before the plan is made.
select id, task, queue, state, -rank, ''::bytea, coalesce(payload_type, 'json'), null::bytea, error_code, error_message,
       error_cause, error_details, coalesce(policy, ''::bytea), failures, crash_count, attempt, unique_key,
       coalesce(cancel_requested, false), extract(epoch from enqueued_at)::double precision, enqueued_by,
       extract(epoch from coalesce(run_at, enqueued_at))::double precision,
       extract(epoch from claimed_at)::double precision, extract(epoch from started_at)::double precision,
       extract(epoch from finished_at)::double precision, worker_id, token, coalesce(suspected_crashes, 0),
       coalesce(run_alone, false), awaits_signal, awaits_signal is null or scheduled
from {schema}.jobs
where (%(before_id)s::bigint is null or id < %(before_id)s)
  and (%(from_id)s::bigint is null or id >= %(from_id)s)
  and (%(states)s::text[] is null or state = any (%(states)s::text[]))
  -- What these states imply is said, so that the indexes of the few are found among the many.
  and (not %(held)s::boolean or held)
  and (not %(pending)s::boolean or ready or scheduled or blocked)
  and (not %(wrong)s::boolean or error_code is not null)
  and (%(queue)s::text is null or queue = %(queue)s)
  and (%(task)s::text is null or task = %(task)s)
  and (%(error)s::text is null or error_code = %(error)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
  and (%(older_than_s)s::double precision is null
       or enqueued_at <= clock_timestamp() - make_interval(secs => %(older_than_s)s))
  and (%(newer_than_s)s::double precision is null
       or enqueued_at >= clock_timestamp() - make_interval(secs => %(newer_than_s)s))
order by id desc
limit %(limit)s;

-- name: count_jobs
select state, count(*) from {schema}.jobs group by state;

-- name: attempts
-- The present attempt is the last one, even if the clock was set back since an earlier one. Tokens are in no order: each
-- session has some in stock.
select s.token, s.worker_id, s.state, extract(epoch from s.claimed_at)::double precision,
       extract(epoch from s.started_at)::double precision, extract(epoch from s.ended_at)::double precision, s.code, s.cause,
       extract(epoch from s.last_heartbeat_at)::double precision,
       extract(epoch from s.heartbeat_deadline)::double precision, extract(epoch from s.deadline)::double precision, a.body::text
from {schema}.attempt_status s
join {schema}.jobs j on j.id = s.job_id
left join {schema}.autopsies a on a.job_id = s.job_id and a.token = s.token
where s.job_id = %(job_id)s
order by s.token is not distinct from j.token, s.claimed_at, s.token;

-- name: deferred_outcome
select d.worker_id, d.is_return, d.reason, extract(epoch from d.since)::double precision
from {schema}.jobs j
join {schema}.deferred_outcomes d on d.worker_id = j.worker_id and d.token = j.token
where j.id = %(job_id)s and j.held and (d.good_until is null or d.good_until > clock_timestamp());

-- name: progress
select job_id, token, at, done, total, message, busy_since from {schema}.progress where job_id = any (%(ids)s);

-- name: events_after
select id, extract(epoch from at)::double precision, kind, job_id, worker_id, message, transaction_id::text::bigint
from {schema}.events
where id > %(after_id)s
  and (%(job_id)s::bigint is null or job_id = %(job_id)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
order by id
limit %(limit)s;

-- name: last_events
select id, extract(epoch from at)::double precision, kind, job_id, worker_id, message, transaction_id::text::bigint
from {schema}.events
where (%(job_id)s::bigint is null or job_id = %(job_id)s)
  and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
order by id desc
limit %(limit)s;

-- name: newest_event
-- One statement is one snapshot: it says what can be seen, and which transactions are open. Transactions of the future
-- are those of another server: a dump brought them. They count as transaction 0, which `sweep_moved_events` makes of them:
-- if there are no others, the newest event is the last of them.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select e.id, e.transaction_id::text::bigint, extract(epoch from e.at)::double precision,
       l.running
from look l
left join lateral (
    select n.id, n.transaction_id, n.at from (
        (select 1 as choice, id, transaction_id, at from {schema}.events
         where transaction_id > '0' and transaction_id < pg_snapshot_xmax(l.snapshot)
         order by transaction_id desc, id desc
         limit 1)
        union all
        (select 2, id, '0', at from {schema}.events order by id desc limit 1)
    ) n
    order by n.choice
    limit 1
) e on true;

-- name: events_since
-- First what open transactions brought since, then what is new.
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select l.running,
       case when o.transaction_id < pg_snapshot_xmax(l.snapshot) then o.transaction_id::text::bigint else 0 end,
       extract(epoch from o.at)::double precision,
       (select min(id) from {schema}.events),
       e.id, extract(epoch from e.at)::double precision, e.kind, e.job_id, e.worker_id, e.message,
       e.transaction_id::text::bigint
from look l
left join {schema}.events o on o.id = %(origin)s
left join lateral (
    select * from (
        (select * from {schema}.events
         where transaction_id = any (%(open)s::text[]::xid8[])
           and not exists (select 1 from unnest(%(begun)s::text[]::xid8[], %(begun_up_to)s::bigint[]) as b(xid, up_to)
                           where b.xid = transaction_id and id <= b.up_to)
           and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
         order by transaction_id, id
         limit %(limit)s)
        union all
        (select * from {schema}.events
         where (transaction_id, id) > (%(transaction)s::text::xid8, %(id)s)
           and transaction_id < pg_snapshot_xmax(l.snapshot)
           and (%(worker_id)s::text is null or worker_id = %(worker_id)s)
         order by transaction_id, id
         limit %(limit)s)
    ) found
    order by transaction_id, id
    limit %(limit)s
) e on true
order by e.transaction_id, e.id;

-- name: events_of_job_since
with look as materialized (
    select snapshot, array(select x.xid::text::bigint from pg_snapshot_xip(snapshot) as x(xid)) as running
    from pg_current_snapshot() as snapshot
)
select l.running,
       case when o.transaction_id < pg_snapshot_xmax(l.snapshot) then o.transaction_id::text::bigint else 0 end,
       extract(epoch from o.at)::double precision,
       (select min(id) from {schema}.events),
       e.id, extract(epoch from e.at)::double precision, e.kind, e.job_id, e.worker_id, e.message,
       e.transaction_id::text::bigint
from look l
left join {schema}.events o on o.id = %(origin)s
left join lateral (
    select * from (
        select id, at, kind, job_id, worker_id, message,
               case when transaction_id < pg_snapshot_xmax(l.snapshot) then transaction_id else '0' end as transaction_id
        from {schema}.events where job_id = %(job_id)s
    ) of_job
    where ((transaction_id, id) > (%(transaction)s::text::xid8, %(id)s)
           or transaction_id = any (%(open)s::text[]::xid8[]))
      and not exists (select 1 from unnest(%(begun)s::text[]::xid8[], %(begun_up_to)s::bigint[]) as b(xid, up_to)
                           where b.xid = transaction_id and id <= b.up_to)
    order by transaction_id, id
    limit %(limit)s
) e on true
order by e.transaction_id, e.id;

-- name: outputs
-- In the order of `attempts`.
select o.token, o.stdout, o.stderr
from {schema}.outputs o
join {schema}.jobs j on j.id = o.job_id
left join {schema}.attempts a on a.job_id = o.job_id and a.token = o.token
where o.job_id = %(job_id)s
order by o.token is not distinct from j.token, a.claimed_at nulls first, o.token;

-- name: workers
select w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency,
       extract(epoch from w.created_at)::double precision, extract(epoch from v.beat_at)::double precision, v.silent_s,
       extract(epoch from w.stopped_at)::double precision, v.running, v.processed,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id), w.version, w.metadata, w.verdict,
       w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
       w.running_stale_after_s, w.recovery,
       (select count(*) from {schema}.jobs j where j.held and j.worker_id = w.id and j.state = 'running')
from {schema}.workers w
join {schema}.worker_watch v on v.worker_id = w.id
left join {schema}.hosts h on h.name = w.host
where w.state in ('active', 'draining', 'suspect') or not %(living_only)s
order by w.created_at, w.id;

-- name: queues
with ready as (
    select queue, count(*) as pending, min(coalesce(run_at, enqueued_at)) as since
    from {schema}.jobs where ready group by queue
), scheduled as (
    select queue, count(*) filter (where state = 'pending') as scheduled, count(*) filter (where state = 'waiting') as asleep
    from {schema}.jobs where scheduled group by queue
), awaiting as (
    select queue, count(*) as signals from {schema}.jobs where awaits_signal is not null and not scheduled group by queue
), blocked as (
    select queue, count(*) as blocked from {schema}.jobs where blocked group by queue
), held as (
    select queue, count(*) filter (where state = 'claimed') as claimed, count(*) filter (where state = 'running') as running
    from {schema}.jobs where held group by queue
), served as (
    select q.name as queue, count(*) as workers
    from {schema}.workers w cross join lateral unnest(w.queues) as q(name)
    where w.state in ('active', 'draining', 'suspect') group by q.name
), names as (
    select queue from ready union select queue from scheduled union select queue from awaiting union select queue from blocked union select queue from held union select queue from served
    union select queue from {schema}.tasks union select name from {schema}.queues where paused
)
select n.queue, coalesce(p.paused, false), coalesce(r.pending, 0), coalesce(s.scheduled, 0), coalesce(h.claimed, 0),
       coalesce(h.running, 0), greatest(0, extract(epoch from clock_timestamp() - r.since))::double precision,
       coalesce(v.workers, 0), coalesce(s.asleep, 0) + coalesce(a.signals, 0), coalesce(b.blocked, 0), r.since is not null
from names n
left join {schema}.queues p on p.name = n.queue
left join ready r on r.queue = n.queue
left join scheduled s on s.queue = n.queue
left join awaiting a on a.queue = n.queue
left join blocked b on b.queue = n.queue
left join held h on h.queue = n.queue
left join served v on v.queue = n.queue
order by n.queue;

-- name: tasks
select name, queue, coalesce(policy, ''::bytea), is_async from {schema}.tasks order by name;

-- What operators do.

-- name: set_paused
with changed as (
    insert into {schema}.queues as q (name, paused, paused_by, paused_at)
    select u.name, %(paused)s, %(by)s, clock_timestamp() from unnest(%(names)s::text[]) as u(name) order by u.name
    on conflict (name) do update
    set paused = excluded.paused, paused_by = excluded.paused_by, paused_at = excluded.paused_at
    where q.paused <> excluded.paused
    returning q.name
), told as (
    insert into {schema}.events (kind, message)
    select 'queue_' || %(word)s::text, format('Queue ''%%s'' was %%s by %%s', c.name, %(word)s::text, %(by)s::text) from changed c
)
select name from changed order by name;

-- name: paused_queues
select name from {schema}.queues where paused order by name;

-- name: request
with asked as (
    update {schema}.workers set request = %(what)s
    where id = %(worker_id)s and state in ('active', 'draining', 'suspect')
    returning id
)
insert into {schema}.events (kind, worker_id, message)
select 'worker_asked_to_' || %(what)s::text, a.id, format('Asked to %%s by %%s', %(what)s::text, %(by)s::text) from asked a
returning id;

-- name: nodes_to_stop
-- What still runs of these, if they are workflows, and was not asked to stop.
select n.job_id
from {schema}.workflows w
join {schema}.workflow_nodes n on n.workflow_id = w.id
join {schema}.jobs j on j.id = n.job_id
where w.id = any (%(ids)s) and w.state = 'cancelled' and n.state = 'released' and n.kind = 'task' and j.held
  and j.cancel_requested is not true;

-- name: cancel
select job_id, answer, worker_id from {schema}.cancel_v1(%(ids)s, %(by)s);

-- name: cancel_untaken
-- Those that have been due for so long and wait for a worker. Locked while it is asked: no worker takes them in between.
-- What another session has in hand is left for the next time.
with untaken as materialized (
    select j.id
    from {schema}.jobs j
    where j.id = any (%(ids)s) and j.state = 'pending'
      and coalesce(j.run_at, j.enqueued_at) <= clock_timestamp() - make_interval(secs => %(waited_s)s)
    for update of j skip locked
)
select c.job_id
from (select array_agg(u.id order by u.id) as ids from untaken u) w
cross join lateral {schema}.cancel_v1(w.ids, %(by)s) c
where w.ids is not null and c.answer = 'cancelled';

-- name: stop_node
-- Of a workflow that is still cancelled: meanwhile it may have been taken up again.
with locked as materialized (
    select j.id
    from {schema}.jobs j
    join {schema}.workflows w on w.id = j.workflow_id
    where j.id = %(id)s and w.state = 'cancelled'
    for update of w
)
select c.job_id, c.answer from locked l cross join lateral {schema}.cancel_v1(array[l.id], %(by)s) c;

-- name: retry
select {schema}.retry_v1(%(job_id)s, %(by)s);

-- name: purge
select {schema}.purge_v1(%(ids)s, %(cause)s);

-- name: to_purge
select {schema}.to_purge_v1(%(queue)s, %(after)s, %(limit)s);

-- name: tell
insert into {schema}.events (kind, message) values (%(kind)s, %(message)s) returning id;

-- What jobs wrote down on their way, and the signals that were sent to them.

-- name: journal_lines
select job_id, seq, kind, name, value, extract(epoch from clock_timestamp() - at)::double precision
from {schema}.journal where job_id = any (%(ids)s) order by job_id, seq;

-- name: kept_signals
select job_id, number, name, value from {schema}.signals
where job_id = any (%(ids)s) and taken_seq is null order by job_id, number;

-- name: signal
select answer, queue from {schema}.signal_v1(%(job_id)s, %(name)s, %(value)s, %(by)s, %(limit)s);

-- name: journal
select seq, kind, name, value, extract(epoch from at)::double precision, token
from {schema}.journal where job_id = %(job_id)s order by seq;

-- name: journal_within
-- The largest values are left out. They are not read: only their sizes are.
select j.seq, j.kind, j.name, case when s.until_bytes <= %(within_bytes)s then j.value else ''::bytea end,
       extract(epoch from j.at)::double precision, j.token
from {schema}.journal j
join (
    select k.seq, sum(octet_length(k.value)) over (order by octet_length(k.value), k.seq) as until_bytes
    from {schema}.journal k where k.job_id = %(job_id)s
) s on s.seq = j.seq
where j.job_id = %(job_id)s order by j.seq;

-- name: signals_within
select g.number, g.name, case when s.until_bytes <= %(within_bytes)s then g.value else ''::bytea end,
       extract(epoch from g.at)::double precision, g.sent_by, g.taken_seq
from {schema}.signals g
join (
    select k.number, sum(octet_length(k.value)) over (order by octet_length(k.value), k.number) as until_bytes
    from {schema}.signals k where k.job_id = %(job_id)s
) s on s.number = g.number
where g.job_id = %(job_id)s order by g.number;

-- name: signals
select number, name, value, extract(epoch from at)::double precision, sent_by, taken_seq
from {schema}.signals where job_id = %(job_id)s order by number;

-- Requests that must not be done twice.

-- name: enqueue_once
-- The same when done twice: its key is there then.
select first, fingerprint, job_ids, fresh from {schema}.enqueue_once_v1(
    %(key)s, %(fingerprint)s, %(keep_s)s, %(ids)s, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s, %(policies)s,
    %(on_crash)s, %(heartbeats)s, %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s,
    %(unique_keys)s, %(enqueued_by)s, %(more)s);
