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
