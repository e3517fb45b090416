-- Requests that must not be done twice.

-- name: enqueue_once
-- The same when done twice: its key is there then.
select first, fingerprint, job_ids, fresh from {schema}.enqueue_once_v1(
    %(key)s, %(fingerprint)s, %(keep_s)s, %(ids)s, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s, %(policies)s,
    %(on_crash)s, %(heartbeats)s, %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s,
    %(unique_keys)s, %(enqueued_by)s, %(more)s);
