-- Jobs on their way in, through a worker's hands, and out.

-- name: reserve_job_ids
-- Ids come from a counter and not from the highest row: a pruned id must never come back as another job.
UPDATE unstuck_ledger SET last_job_id = last_job_id + ? RETURNING last_job_id;

-- name: insert_job
INSERT INTO unstuck_jobs (
    id, state, ready, scheduled, held, rank, queue, task, run_at, on_crash, heartbeat, heartbeat_timeout_s, timeout_s,
    enqueued_at, unique_key, active_key, enqueued_by, payload_type, policy, payload
) VALUES (?1, 'pending', ?2, 1 - ?2, 0, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?17, ?13, ?14, ?15, ?16);

-- name: insert_tied_job
-- The same with what few jobs have.
INSERT INTO unstuck_jobs (
    id, state, ready, scheduled, held, rank, queue, task, run_at, on_crash, heartbeat, heartbeat_timeout_s, timeout_s,
    enqueued_at, unique_key, active_key, enqueued_by, payload_type, policy, payload,
    has_links, concurrency_key, workflow_id, place, hooks, expires_at, retain_s, concurrency_limit, unique_for, needs_inputs, blocked
) VALUES (
    ?1, 'pending', ?2 AND ?19 IS NULL, 1 - ?2, 0, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?17, ?13, ?14, ?15, ?16,
    ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?2 AND ?19 IS NOT NULL
);

-- name: tied_among
SELECT j.id FROM json_each(?) i CROSS JOIN unstuck_jobs j ON j.id = i.value WHERE j.has_links = 1;

-- name: find_live_key
-- The write lock is held from here to the insert, so nobody can come in between.
SELECT id FROM unstuck_jobs WHERE active_key = ?;

-- name: know_queue
INSERT INTO unstuck_queues (name) VALUES (?) ON CONFLICT DO NOTHING;

-- name: peek_ready
-- Pinned to the index of what is ready: statistics taken at a bad moment cannot make it scan.
SELECT
    rank, id, on_crash, task, queue, payload, coalesce(payload_type, 'json'), coalesce(policy, x''), failures, crash_count,
    attempt, suspected_crashes, run_alone, coalesce(run_at, enqueued_at), journal, needs_inputs, expires_at, unique_for
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1 AND task IN (SELECT value FROM json_each(?2))
ORDER BY rank, id
LIMIT ?3;

-- name: peek_ready_of_ranks
-- The same, on one side of a gap. The id is no second bound beside the rank in one query: SQLite compares (rank, id) with
-- a place by the index as far as the rank only, and would read all of that rank.
SELECT
    rank, id, on_crash, task, queue, payload, coalesce(payload_type, 'json'), coalesce(policy, x''), failures, crash_count,
    attempt, suspected_crashes, run_alone, coalesce(run_at, enqueued_at), journal, needs_inputs, expires_at, unique_for
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1 AND rank > ?4 AND rank < ?5 AND task IN (SELECT value FROM json_each(?2))
ORDER BY rank, id
LIMIT ?3;

-- name: peek_ready_of_rank
SELECT
    rank, id, on_crash, task, queue, payload, coalesce(payload_type, 'json'), coalesce(policy, x''), failures, crash_count,
    attempt, suspected_crashes, run_alone, coalesce(run_at, enqueued_at), journal, needs_inputs, expires_at, unique_for
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1 AND rank = ?4 AND id > ?5 AND task IN (SELECT value FROM json_each(?2))
ORDER BY id
LIMIT ?3;

-- name: ready_inside
-- Whether somebody put a job into a gap since it was found.
SELECT 1
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1 AND rank >= ?3 AND rank < ?4 AND task IN (SELECT value FROM json_each(?2))
UNION ALL
SELECT 1
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1 AND rank = ?4 AND id <= ?5 AND task IN (SELECT value FROM json_each(?2))
LIMIT 1;

-- name: nth_ready
-- Of those up to a place.
SELECT rank FROM (
    SELECT rank FROM (
        SELECT rank FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1 AND queue = ?1 AND rank < ?2
        ORDER BY rank, id LIMIT ?4 + 1
    )
    UNION ALL
    SELECT rank FROM (
        SELECT rank FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
        WHERE ready = 1 AND queue = ?1 AND rank = ?2 AND id <= ?3
        ORDER BY id LIMIT ?4 + 1
    )
)
LIMIT 1 OFFSET ?4;

-- name: nth_ready_from_behind
SELECT rank, id
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND queue = ?1
ORDER BY rank DESC, id DESC
LIMIT 1 OFFSET ?2;

-- name: queue_gates
-- Queues of which not everything may be taken.
SELECT name, paused, concurrency, rate, rate_window_s, tokens, refilled_at FROM unstuck_queues
WHERE paused = 1 OR concurrency IS NOT NULL OR rate IS NOT NULL;

-- name: reserve_tokens
UPDATE unstuck_ledger SET last_token = last_token + ? RETURNING last_token;

-- name: claim_job
-- Safe without more of a guard: the peek was made under the same write lock. No RETURNING: it would build and drop a
-- table in memory for every row, and the peek has read the row already.
UPDATE unstuck_jobs
SET state = ?4, ready = 0, held = 1, token = ?2, worker_id = ?3, claimed_at = ?5, started_at = ?6, started_boot_s = ?7,
    attempt = attempt + ?8
WHERE id = ?1 AND ready = 1;

-- name: next_due
SELECT run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled WHERE scheduled = 1 AND queue = ? ORDER BY run_at LIMIT 1;

-- name: start_job
UPDATE unstuck_jobs
SET state = 'running', started_at = ?4, started_boot_s = ?5, attempt = attempt + 1
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND state = 'claimed';

-- name: finish_job
-- The plain way out: the key is the primary key, the rest is the fence.
UPDATE unstuck_jobs
SET state = 'succeeded', held = 0, result = ?4, finished_at = ?5, active_key = NULL, error_code = NULL,
    error_message = NULL, error_cause = NULL, error_details = NULL
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND state = 'running';

-- name: attempt_in_hand
SELECT state, cancel_requested, has_links, unstopped FROM unstuck_jobs WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: archive_attempt
INSERT INTO unstuck_attempts (
    job_id, token, worker_id, state, claimed_at, started_at, ended_at, code, cause, last_heartbeat_at
)
SELECT j.id, j.token, j.worker_id, ?3, j.claimed_at, j.started_at, ?4, ?5, ?6,
    (SELECT b.beat_at FROM unstuck_worker_heartbeats b WHERE b.worker_id = j.worker_id)
FROM unstuck_jobs j
WHERE j.id = ?1 AND j.token = ?2;

-- name: requeue_job
UPDATE unstuck_jobs
SET state = 'pending', ready = (?4 AND concurrency_key IS NULL), blocked = (?4 AND concurrency_key IS NOT NULL), scheduled = 1 - ?4, held = 0,
    run_at = ?5, token = NULL, worker_id = NULL,
    claimed_at = NULL, started_at = NULL, started_boot_s = NULL, failures = failures + ?6,
    crash_count = crash_count + ?7, suspected_crashes = suspected_crashes + ?8, run_alone = max(run_alone, ?9), error_code = ?10,
    error_message = ?11, error_cause = ?12, error_details = ?13, unstopped = NULL,
    -- What has begun does not expire any more.
    expires_at = iif(state = 'running', NULL, expires_at)
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: suspend_job
-- It gives its slot back until a time (?4) or a signal (?5).
UPDATE unstuck_jobs
SET state = 'waiting', expires_at = NULL, scheduled = ?4 IS NOT NULL, held = 0, run_at = coalesce(?4, run_at), awaits_signal = ?5, token = NULL,
    worker_id = NULL, claimed_at = NULL, started_at = NULL, started_boot_s = NULL, error_code = NULL,
    error_message = NULL, error_cause = NULL, error_details = NULL, unstopped = NULL
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: end_job
UPDATE unstuck_jobs
SET state = ?4, held = 0, last_attempt_state = ?5, finished_at = ?6, active_key = NULL, failures = failures + ?7,
    crash_count = crash_count + ?8, suspected_crashes = suspected_crashes + ?9, run_alone = max(run_alone, ?10), error_code = ?11,
    error_message = ?12, error_cause = ?13, error_details = ?14, result = ?15
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: release_job
-- User code never ran: no attempt is spent, and the job goes back to its old place.
UPDATE unstuck_jobs
SET state = 'pending', ready = 1, held = 0, token = NULL, worker_id = NULL, claimed_at = NULL, started_at = NULL,
    started_boot_s = NULL, unstopped = NULL, attempt = attempt - (state = 'running')
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: store_output
-- Only of an attempt that was this worker's.
INSERT INTO unstuck_outputs (job_id, token, stdout, stderr)
SELECT ?1, ?2, ?4, ?5
WHERE EXISTS (SELECT 1 FROM unstuck_jobs WHERE id = ?1 AND token = ?2 AND worker_id = ?3)
    OR EXISTS (SELECT 1 FROM unstuck_attempts WHERE job_id = ?1 AND token = ?2 AND worker_id = ?3)
ON CONFLICT (job_id, token) DO UPDATE SET stdout = excluded.stdout, stderr = excluded.stderr;

-- name: store_autopsy
-- Called only for an ending that was written just now, in the same transaction.
INSERT INTO unstuck_autopsies (job_id, token, body) VALUES (?1, ?2, ?3)
ON CONFLICT (job_id, token) DO UPDATE SET body = excluded.body;

-- name: add_last_words
-- Only to a report that says that this is missing.
UPDATE unstuck_autopsies SET body = json_remove(json_patch(body, ?3), '$.missing')
WHERE job_id = ?1 AND token = ?2 AND json_extract(body, '$.missing') IS NOT NULL;

-- name: note_progress
-- Only of an attempt that this worker still runs.
INSERT INTO unstuck_progress (job_id, token, at, done, total, message, busy_since)
SELECT ?1, ?2, ?4, ?5, ?6, ?7, ?8
WHERE EXISTS (SELECT 1 FROM unstuck_jobs WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND state = 'running')
ON CONFLICT (job_id) DO UPDATE
SET token = excluded.token, at = excluded.at, done = excluded.done, total = excluded.total, message = excluded.message,
    busy_since = excluded.busy_since;

-- name: forget_deferred
-- Whatever was noted of this worker and is over, so that the table stays small.
DELETE FROM unstuck_deferred_outcomes
WHERE worker_id = ?1 AND NOT EXISTS (
    SELECT 1 FROM unstuck_jobs j
    WHERE j.id = unstuck_deferred_outcomes.job_id AND j.held = 1 AND j.token = unstuck_deferred_outcomes.token
);

-- name: note_deferred
INSERT INTO unstuck_deferred_outcomes (worker_id, token, job_id, is_return, reason, since, good_until)
SELECT id, ?2, ?3, ?4, ?5, ?6, ?7 FROM unstuck_workers WHERE id = ?1
ON CONFLICT (worker_id, token) DO UPDATE SET reason = excluded.reason, good_until = excluded.good_until;

-- name: held_by
SELECT
    j.id, j.token, j.worker_id, j.state, j.task, j.queue, coalesce(j.policy, x''), j.failures, j.crash_count,
    j.cancel_requested, j.timeout_s, iif(j.heartbeat, coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), NULL),
    j.claimed_at, j.started_at, j.started_boot_s, w.boot_id, b.beat_at, w.state, w.suspect_after_s, j.suspected_crashes,
    (
        SELECT coalesce(d.good_until, 9e999) FROM unstuck_deferred_outcomes d
        WHERE d.worker_id = j.worker_id AND d.token = j.token
    )
FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
LEFT JOIN unstuck_workers w ON w.id = j.worker_id
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = j.worker_id
WHERE j.held = 1 AND j.worker_id = ?1
ORDER BY j.claimed_at, j.token
LIMIT ?2;

-- name: held_by_anyone
SELECT
    j.id, j.token, j.worker_id, j.state, j.task, j.queue, coalesce(j.policy, x''), j.failures, j.crash_count,
    j.cancel_requested, j.timeout_s, iif(j.heartbeat, coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), NULL),
    j.claimed_at, j.started_at, j.started_boot_s, w.boot_id, b.beat_at, w.state, w.suspect_after_s, j.suspected_crashes,
    (
        SELECT coalesce(d.good_until, 9e999) FROM unstuck_deferred_outcomes d
        WHERE d.worker_id = j.worker_id AND d.token = j.token
    )
FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
LEFT JOIN unstuck_workers w ON w.id = j.worker_id
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = j.worker_id
WHERE j.held = 1
ORDER BY j.claimed_at, j.token;

-- name: outcomes
SELECT j.id, j.state, j.result, j.error_code, j.error_message, j.error_cause, j.error_details
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.finished_at IS NOT NULL;

-- name: missing
SELECT i.value FROM json_each(?) i WHERE NOT EXISTS (SELECT 1 FROM unstuck_jobs j WHERE j.id = i.value);

-- name: started_just_now
SELECT j.id, j.token
FROM json_each(?1) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.worker_id = ?2 AND j.started_at = ?3 AND j.started_boot_s = ?4 AND j.state = 'running';

-- name: finished_just_now
SELECT j.id, j.token
FROM json_each(?1) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.worker_id = ?2 AND j.finished_at = ?3 AND j.state = 'succeeded';

-- name: hooked_among
SELECT j.id, j.task, j.queue, j.state, j.attempt, j.error_code, j.error_message, j.error_cause, j.hooks
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.hooks IS NOT NULL;
