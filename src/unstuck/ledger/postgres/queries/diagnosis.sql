-- What the doctor looks at. Nothing here changes anything, and every look has an end.

-- name: clock
select extract(epoch from clock_timestamp())::double precision;

-- name: look_ready
-- Jumps from queue to queue in the index of what is ready, counts up to a limit, and reads both ends of each queue.
with recursive found (queue) as (
    (select queue from {schema}.jobs where ready order by queue limit 1)
    union all
    select (select j.queue from {schema}.jobs j where j.ready and j.queue > f.queue order by j.queue limit 1)
    from found f where f.queue is not null
), names as (
    select queue from found where queue is not null limit %(queues)s
)
select n.queue, coalesce(q.paused, false), c.ready, t.task, t.seen, t.first_id, t.waited_s
from names n
left join {schema}.queues q on q.name = n.queue
cross join lateral (
    select count(*) as ready
    from (select 1 from {schema}.jobs j where j.ready and j.queue = n.queue limit %(count)s) few
) c
cross join lateral (
    select task, count(*) as seen, (array_agg(id order by rank, id))[1] as first_id,
           greatest(0, extract(epoch from clock_timestamp() - min(since)))::double precision as waited_s
    from (
        (select id, task, rank, coalesce(run_at, enqueued_at) as since
         from {schema}.jobs j where j.ready and j.queue = n.queue order by j.rank, j.id limit %(jobs)s)
        union
        (select id, task, rank, coalesce(run_at, enqueued_at)
         from {schema}.jobs j where j.ready and j.queue = n.queue order by j.rank desc, j.id desc limit %(jobs)s)
    ) ends
    group by task
) t
order by n.queue, t.task;

-- name: look_scheduled
select queue, task, count(*), min(id), max(due_in_s)
from (
    -- Jobs that sleep, or wait for a signal with a timeout, are not scheduled. A bounded number of them is passed over.
    select queue, task, id, extract(epoch from run_at - now())::double precision as due_in_s
    from (
        select queue, task, id, run_at, state from {schema}.jobs
        where scheduled and run_at > now() + make_interval(secs => %(far_s)s)
        order by run_at desc limit 20 * %(jobs)s
    ) looked
    where state = 'pending'
    order by run_at desc limit %(jobs)s
) far
group by queue, task order by count(*) desc, queue, task limit %(groups)s;

-- name: look_coming
-- Those that are due next, with the first of them as the example.
select queue, task, count(*), (array_agg(id order by due_in_s, id))[1], min(due_in_s)
from (
    select queue, task, id, extract(epoch from run_at - now())::double precision as due_in_s
    from (
        select queue, task, id, run_at, state from {schema}.jobs
        where scheduled and run_at > now()
        order by run_at limit 20 * %(jobs)s
    ) looked
    where state = 'pending'
    order by run_at limit %(jobs)s
) coming
group by queue, task order by min(due_in_s), queue, task limit %(groups)s;

-- name: look_overdue
select queue, task, count(*), min(id), max(late_s)
from (
    select queue, task, id, extract(epoch from now() - run_at)::double precision as late_s
    from {schema}.jobs
    where scheduled and run_at < now() - make_interval(secs => %(late_s)s)
    order by run_at limit %(jobs)s
) late
group by queue, task order by count(*) desc, queue, task limit %(groups)s;

-- name: look_quarantined
-- The newest of those that went wrong, by their own index.
select queue, task, count(*), max(id), 0::double precision
from (
    select queue, task, id, state from {schema}.jobs where error_code is not null order by id desc limit %(errors)s
) wrong
where state = 'quarantined'
group by queue, task order by count(*) desc, queue, task limit %(groups)s;

-- name: look_ticket
select greatest(0, extract(epoch from clock_timestamp() - until))::double precision
from {schema}.tickets where name = %(name)s;

-- name: look_watch
-- About 200 rows, 2,000 at most: the ledger keeps no more.
select cause, extract(epoch from since)::double precision, gap_s, set_back_s,
       extract(epoch from set_back_at)::double precision
from {schema}.watch_periods order by id desc;

-- name: look_paused
select name from {schema}.queues where paused order by name limit %(queues)s;

-- name: look_tables
-- The statistics of the server: what it believes, at the cost of nothing.
select s.relname::text, s.n_live_tup, s.n_dead_tup, pg_total_relation_size(s.relid),
       extract(epoch from clock_timestamp() - greatest(
           s.last_vacuum, s.last_autovacuum, (select min(applied_at) from {schema}.migrations)))::double precision,
       current_setting('autovacuum')::boolean and coalesce((
           select o.option_value::boolean from pg_class c cross join lateral pg_options_to_table(c.reloptions) o
           where c.oid = s.relid and o.option_name = 'autovacuum_enabled'), true)
from pg_stat_all_tables s
where s.schemaname = %(schema)s and s.relname in ('jobs', 'worker_heartbeats')
order by s.relname desc;

-- name: look_holders
-- Transactions that have locked tables of the ledger, or that are asked for. Reading and vacuum hold up nobody. Of other
-- roles we may see no more than the pid.
select l.pid, a.usename::text, a.application_name, a.state, left(a.query, %(chars)s), l.tables, l.virtualtransaction,
       p.gid, extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::double precision as age_s,
       l.whole_table
from (
    select k.pid, k.virtualtransaction, array_agg(k.transactionid::text) as xids,
           array_agg(distinct c.relname::text) filter (where c.oid is not null) as tables,
           coalesce(bool_or(k.mode = 'AccessExclusiveLock') filter (where c.oid is not null), false) as whole_table
    from pg_locks k
    left join pg_class c on c.oid = k.relation and c.relkind in ('r', 'p') and k.granted
         and k.database = (select d.oid from pg_database d where d.datname = current_database())
         and c.relnamespace = to_regnamespace(%(schema)s)
         and k.mode not in ('AccessShareLock', 'ShareUpdateExclusiveLock')
    where k.pid is distinct from pg_backend_pid()
    group by k.pid, k.virtualtransaction
    having count(c.oid) > 0 or k.pid = any (%(pids)s)
) l
left join pg_stat_activity a on a.pid = l.pid
left join pg_prepared_xacts p on l.pid is null and p.transaction::text = any (l.xids)
where coalesce(a.backend_type, 'client backend') = 'client backend'
  and (coalesce(a.xact_start, p.prepared) is null
       or coalesce(a.xact_start, p.prepared) < clock_timestamp() - make_interval(secs => %(open_s)s))
order by age_s desc nulls last limit %(groups)s;

-- name: look_locked_jobs
-- Jobs in the hands of workers whose row a session has locked. Nobody waits for such a row: the worker tries again later.
select l.pid, j.id
from (select h.id, h.xmax from {schema}.jobs h where h.held limit %(jobs)s) j
join pg_locks l on l.locktype = 'transactionid' and l.granted and l.mode = 'ExclusiveLock' and l.transactionid = j.xmax
where l.pid = any (%(pids)s)
order by j.id limit %(groups)s;

-- name: look_waits
-- Who waits for whom, of those that have to do with the ledger: by their name, or by the tables that they use.
select w.pid, coalesce(a.application_name, ''), b.pid
from (select distinct k.pid from pg_locks k where not k.granted and k.pid is not null) w
join pg_stat_activity a on a.pid = w.pid and a.datname = current_database()
cross join lateral unnest(pg_blocking_pids(w.pid)) b (pid)
where a.application_name like 'unstuck %%' or exists (
    select 1 from pg_locks k join pg_class c on c.oid = k.relation
    where k.pid = w.pid and k.database = a.datid and c.relnamespace = to_regnamespace(%(schema)s))
limit %(most)s;

-- name: look_snapshots
-- Sessions of other databases hold nothing back here; those of other roles may be hidden from us (NULL).
select kind, name, note, age_s, active, behind
from (
    select 'session' as kind, pid::text as name,
           concat_ws(', ', nullif(usename::text, ''), nullif(application_name, ''), state) as note,
           extract(epoch from clock_timestamp() - xact_start)::double precision as age_s,
           true as active, coalesce(age(backend_xmin), 0) as behind
    from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
      and (backend_xmin is not null or backend_xid is not null) and xact_start is not null
    union all
    select 'prepared', gid, owner::text, extract(epoch from clock_timestamp() - prepared)::double precision,
           true, age(transaction)
    from pg_prepared_xacts where database = current_database()
    union all
    select 'slot', slot_name::text, slot_type, null, active, age(xmin)
    from pg_replication_slots where xmin is not null
) held
order by age_s desc nulls first limit %(groups)s;

-- name: look_retention
-- By how long the oldest row of each kind is past its retention, if it is. Ids go with time: the first jobs and events
-- that the walk of retention has left tell it. What ended in a workflow that is open may still be needed. Jobs with a
-- time of their own, and unique keys, are found in their indexes; the first jumps from time to time.
with recursive own (retain_s) as (
    (select retain_s from {schema}.jobs where retain_s is not null and finished_at is not null order by retain_s limit 1)
    union all
    select (select j.retain_s from {schema}.jobs j
            where j.retain_s is not null and j.finished_at is not null and j.retain_s > o.retain_s order by j.retain_s limit 1)
    from own o where o.retain_s is not null
), late (kind, past) as (
    select 'jobs', clock_timestamp() - j.finished_at - make_interval(secs => greatest(%(jobs_s)s, j.retain_s))
    from (
        select finished_at, retain_s, workflow_id from {schema}.jobs
        where id >= coalesce((select least(position, lowest_left - 1) from {schema}.retention_positions where name = 'jobs'), 0)
        order by id limit %(rows)s) j
    where j.workflow_id is null
       or not exists (select 1 from {schema}.workflows w where w.id = j.workflow_id and w.finished_at is null)
    union all
    select 'jobs', (
        select clock_timestamp() - j.finished_at - make_interval(secs => o.retain_s) from {schema}.jobs j
        where j.retain_s = o.retain_s and j.finished_at is not null and j.workflow_id is null order by j.finished_at limit 1)
    from (select retain_s from own where retain_s is not null limit %(groups)s) o
    union all
    select 'events', clock_timestamp() - e.at - make_interval(secs => %(events_s)s)
    from (
        select at from {schema}.events
        where id >= coalesce((select position from {schema}.retention_positions where name = 'events'), 0)
        order by id limit %(rows)s) e
    union all
    select 'keys', clock_timestamp() - k.until from (select until from {schema}.unique_keys order by until limit 1) k
)
select kind, extract(epoch from max(past))::double precision from late
group by kind having max(past) > interval '0' order by kind;
