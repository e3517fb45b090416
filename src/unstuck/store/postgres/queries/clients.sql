-- What clients ask.

-- name: reserve_job_ids
-- Ids are drawn before the insert: an enqueue whose commit is uncertain is repeated with the same ones.
select nextval('{schema}.job_ids'::regclass) from generate_series(1, %(count)s);

-- name: enqueue
select place, job_id from {schema}.enqueue(
    %(ids)s, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s, %(policies)s, %(on_crash)s, %(heartbeats)s,
    %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s, %(unique_keys)s, %(enqueued_by)s,
    %(more)s);

-- name: outcomes
select id, state, result, error_code, error_message, error_cause, error_details
from {schema}.jobs
where id = any (%(ids)s) and finished_at is not null;

-- name: existing
select id from {schema}.jobs where id = any (%(ids)s);

-- name: ring
-- Alone in its transaction: inside an enqueue it would make commits wait for one another.
select 1 from pg_notify(%(channel)s, %(payload)s);
