-- What people read and ask for.

-- name: job
SELECT
    id, task, queue, state, -rank, payload, coalesce(payload_type, 'json'), result, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs
WHERE id = ?;

-- name: jobs
-- Newest first; long columns are left out.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs NOT INDEXED
WHERE id < ?1 AND id >= ?9
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_with_error
-- The same, by the index of what went wrong: few rows among many.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_error
WHERE error_code IS NOT NULL AND error_code = ?9 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_held
-- The same, of jobs in somebody's hands: few rows among many, by their own index.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_held
WHERE held = 1 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_ready
-- The same, of jobs that may be claimed now.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
WHERE ready = 1 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_waiting
-- The same, of jobs that are due later.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
WHERE scheduled = 1 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_blocked
-- The same, of jobs whose line is full.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked
WHERE blocked = 1 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: jobs_awaiting
-- The same, of jobs that wait for a signal, as long as it takes.
SELECT
    id, task, queue, state, -rank, x'', coalesce(payload_type, 'json'), NULL, error_code, error_message, error_cause,
    error_details, coalesce(policy, x''), failures, crash_count, attempt, unique_key, cancel_requested, enqueued_at,
    enqueued_by, run_at, claimed_at, started_at, finished_at, worker_id, token, suspected_crashes, run_alone, awaits_signal,
    awaits_signal IS NULL OR scheduled
FROM unstuck_jobs INDEXED BY unstuck_jobs_awaiting_signal
WHERE awaits_signal IS NOT NULL AND scheduled = 0 AND id < ?1
    AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
    AND (?3 IS NULL OR queue = ?3)
    AND (?4 IS NULL OR task = ?4)
    AND (?5 IS NULL OR worker_id = ?5)
    AND (?6 IS NULL OR enqueued_at <= ?6)
    AND (?7 IS NULL OR enqueued_at >= ?7)
ORDER BY id DESC
LIMIT ?8;

-- name: many_pending
-- Whether there are so many that reading the newest jobs one by one finds them sooner than sorting all of them.
SELECT
    (SELECT count(*) FROM (SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1 LIMIT ?1))
    + (SELECT count(*) FROM (SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled WHERE scheduled = 1 LIMIT ?1))
    + (SELECT count(*) FROM (SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 LIMIT ?1))
    >= ?1;

-- name: error_codes
-- Every code that occurs, each found by one step into the index.
WITH RECURSIVE codes (code) AS (
    SELECT min(error_code) FROM unstuck_jobs INDEXED BY unstuck_jobs_error WHERE error_code IS NOT NULL
    UNION ALL
    SELECT (
        SELECT min(error_code) FROM unstuck_jobs INDEXED BY unstuck_jobs_error
        WHERE error_code IS NOT NULL AND error_code > code
    )
    FROM codes WHERE code IS NOT NULL
)
SELECT code FROM codes WHERE code IS NOT NULL;

-- name: count_jobs
SELECT state, count(*) FROM unstuck_jobs GROUP BY state;

-- name: attempts
-- The present attempt is the last one, even if the clock was set back since an earlier one.
SELECT
    s.token, s.worker_id, s.state, s.claimed_at, s.started_at, s.ended_at, s.code, s.cause, s.last_heartbeat_at,
    s.heartbeat_deadline, s.deadline, a.body
FROM attempt_status s
JOIN unstuck_jobs j ON j.id = s.job_id
LEFT JOIN unstuck_autopsies a ON a.job_id = s.job_id AND a.token = s.token
WHERE s.job_id = ?
ORDER BY s.token IS j.token, s.claimed_at, s.token;

-- name: deferred_outcome
SELECT d.worker_id, d.is_return, d.reason, d.since
FROM unstuck_jobs j
JOIN unstuck_deferred_outcomes d ON d.worker_id = j.worker_id AND d.token = j.token
WHERE j.id = ?1 AND j.held = 1 AND (d.good_until IS NULL OR d.good_until > ?2);

-- name: progress
SELECT job_id, token, at, done, total, message, busy_since
FROM json_each(?) i
CROSS JOIN unstuck_progress p ON p.job_id = i.value;

-- name: events_of_job
SELECT id, at, kind, job_id, worker_id, message
FROM unstuck_events WHERE job_id IS NOT NULL AND job_id = ?1 AND id > ?2 ORDER BY id LIMIT ?3;

-- name: last_events_of_job
SELECT id, at, kind, job_id, worker_id, message
FROM unstuck_events WHERE job_id IS NOT NULL AND job_id = ?1 ORDER BY id DESC LIMIT ?2;

-- name: events_of_worker
SELECT id, at, kind, job_id, worker_id, message
FROM unstuck_events WHERE worker_id IS NOT NULL AND worker_id = ?1 AND id > ?2 ORDER BY id LIMIT ?3;

-- name: last_events_of_worker
SELECT id, at, kind, job_id, worker_id, message
FROM unstuck_events WHERE worker_id IS NOT NULL AND worker_id = ?1 ORDER BY id DESC LIMIT ?2;

-- name: events_after
SELECT id, at, kind, job_id, worker_id, message FROM unstuck_events WHERE id > ?1 ORDER BY id LIMIT ?2;

-- name: event_time
SELECT at FROM unstuck_events WHERE id = ?1;

-- name: oldest_event
SELECT min(id) FROM unstuck_events;

-- name: last_events
SELECT id, at, kind, job_id, worker_id, message FROM unstuck_events ORDER BY id DESC LIMIT ?1;

-- name: outputs
-- In the order of `attempts`.
SELECT o.token, o.stdout, o.stderr
FROM unstuck_outputs o
JOIN unstuck_jobs j ON j.id = o.job_id
LEFT JOIN unstuck_attempts a ON a.job_id = o.job_id AND a.token = o.token
WHERE o.job_id = ?
ORDER BY o.token IS j.token, a.claimed_at, o.token;

-- name: queue_names
SELECT name, paused FROM unstuck_queues ORDER BY name;

-- name: count_ready
-- Read from the index alone; the oldest is the one with the lowest id.
SELECT queue, count(*), min(id) FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1 GROUP BY queue;

-- name: count_waiting
SELECT queue, count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled WHERE scheduled = 1 GROUP BY queue;

-- name: count_suspended
-- How many there are, and how many of them wait for a time too.
SELECT queue, count(*), sum(scheduled) FROM unstuck_jobs INDEXED BY unstuck_jobs_suspended WHERE state = 'waiting' GROUP BY queue;

-- name: count_blocked_by_queue
SELECT queue, count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 GROUP BY queue;

-- name: count_held
SELECT queue, state, count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1 GROUP BY queue, state;

-- name: run_at_of
SELECT run_at FROM unstuck_jobs WHERE id = ?;

-- name: queues_served
SELECT q.value, count(*)
FROM unstuck_workers w, json_each(w.queues) q
WHERE w.state IN ('active', 'draining', 'suspect')
GROUP BY q.value;

-- name: tasks
SELECT name, queue, coalesce(policy, x''), is_async FROM unstuck_tasks ORDER BY name;

-- name: set_paused
INSERT INTO unstuck_queues (name, paused, changed_at, changed_by) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (name) DO UPDATE SET paused = ?2, changed_at = ?3, changed_by = ?4
WHERE paused <> ?2;

-- name: job_brief
SELECT
    state, worker_id, token, unique_key, last_attempt_state, error_code, coalesce(error_cause, error_message), finished_at, has_links,
    concurrency_key, queue, unique_for
FROM unstuck_jobs
WHERE id = ?;

-- name: is_untaken
-- It is due since that time at the latest, and waits for a worker.
SELECT 1 FROM unstuck_jobs WHERE id = ?1 AND state = 'pending' AND run_at <= ?2;

-- name: cancel_idle_job
-- It waited, or lay in a worker's hands unstarted: the worker's start will find its token gone.
UPDATE unstuck_jobs
SET state = 'cancelled', ready = 0, scheduled = 0, blocked = 0, awaits_signal = NULL, held = 0, token = NULL, worker_id = NULL,
    claimed_at = NULL, finished_at = ?2, active_key = NULL, error_code = 'CANCELLED',
    error_message = 'Job was cancelled', error_cause = ?3, error_details = NULL
WHERE id = ?1 AND state IN ('pending', 'claimed', 'waiting');

-- name: cancel_released_job
-- Asked to be cancelled while it was in somebody's hands, and given back without having run.
UPDATE unstuck_jobs
SET state = 'cancelled', held = 0, token = NULL, worker_id = NULL, claimed_at = NULL, started_at = NULL,
    started_boot_s = NULL, attempt = attempt - (state = 'running'), finished_at = ?4, active_key = NULL,
    error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = ?5, error_details = NULL
WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND held = 1;

-- name: ask_cancel
UPDATE unstuck_jobs SET cancel_requested = 1, unstopped = NULL WHERE id = ? AND state = 'running';

-- name: retry_job
-- What was quarantined runs alone: it killed every process that it was in.
UPDATE unstuck_jobs
SET state = 'pending', ready = concurrency_key IS NULL, blocked = concurrency_key IS NOT NULL, scheduled = 0, run_at = ?2, expires_at = NULL, token = NULL, worker_id = NULL, claimed_at = NULL,
    started_at = NULL, started_boot_s = NULL, finished_at = NULL, last_attempt_state = NULL, failures = 0,
    active_key = iif(unique_for = 'period', NULL, unique_key), crash_count = 0, suspected_crashes = 0, run_alone = (state = 'quarantined'), cancel_requested = 0, unstopped = NULL, error_code = NULL, error_message = NULL, error_cause = NULL,
    error_details = NULL, result = NULL
WHERE id = ?1 AND state IN ('failed', 'cancelled', 'quarantined');

-- name: to_purge
-- The next pending jobs of a queue that have not begun, in the order of their ids.
SELECT id FROM (
    SELECT id, attempt, state FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1 AND queue = ?1
    UNION ALL
    SELECT id, attempt, state FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled WHERE scheduled = 1 AND queue = ?1
    UNION ALL
    SELECT id, attempt, state FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 AND queue = ?1
)
WHERE id > ?2 AND attempt = 0 AND state = 'pending'
ORDER BY id
LIMIT ?3;

-- name: still_to_purge
SELECT j.id, j.workflow_id
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.state = 'pending' AND j.attempt = 0;

-- name: begun_workflows
-- Those of these workflows of which a node has begun: it was tried, or is in the hands of a worker.
SELECT i.value
FROM json_each(?) i
WHERE EXISTS (
    SELECT 1 FROM unstuck_workflow_nodes n LEFT JOIN unstuck_jobs j ON j.id = n.job_id
    WHERE n.workflow_id = i.value AND n.kind = 'task'
        AND (n.state IN ('succeeded', 'failed', 'paused') OR j.attempt > 0 OR j.held = 1));

-- What jobs wrote down on their way, and the signals that were sent to them.

-- name: may_write_entry
SELECT journal FROM unstuck_jobs WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND state = 'running';

-- name: write_entry
-- What is there already is not written again: an uncertain turn is repeated as it was. But what it waited for takes the
-- place of the waiting.
INSERT INTO unstuck_journal (job_id, seq, kind, name, value, at, token) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (job_id, seq) DO UPDATE
SET kind = excluded.kind, value = excluded.value, at = excluded.at, token = excluded.token
WHERE kind = 'wait' AND excluded.kind IN ('signal', 'timeout');

-- name: write_checkpoint
INSERT INTO unstuck_journal (job_id, seq, kind, name, value, at, token) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (job_id, seq) DO UPDATE SET value = excluded.value, at = excluded.at, token = excluded.token;

-- name: take_signal
UPDATE unstuck_signals SET taken_seq = ?3 WHERE job_id = ?1 AND number = ?2 AND taken_seq IS NULL;

-- name: mark_journal
UPDATE unstuck_jobs SET journal = 1 WHERE id = ? AND journal = 0;

-- name: journal_lines
SELECT job_id, seq, kind, name, value, ?2 - at
FROM unstuck_journal WHERE job_id IN (SELECT value FROM json_each(?1)) ORDER BY job_id, seq;

-- name: kept_signals
SELECT job_id, number, name, value
FROM unstuck_signals WHERE taken_seq IS NULL AND job_id IN (SELECT value FROM json_each(?1)) ORDER BY job_id, number;

-- name: journal_bytes
-- The values themselves are not read.
SELECT coalesce((SELECT sum(length(value)) FROM unstuck_journal WHERE job_id = ?1), 0)
    + coalesce((SELECT sum(length(value)) FROM unstuck_signals WHERE job_id = ?1 AND taken_seq IS NULL), 0);

-- name: has_signal
SELECT 1 FROM unstuck_signals WHERE job_id = ?1 AND name = ?2 AND taken_seq IS NULL LIMIT 1;

-- name: job_to_signal
SELECT state, awaits_signal, queue, concurrency_key, place FROM unstuck_jobs WHERE id = ?;

-- name: count_signals
SELECT count(*) FILTER (WHERE taken_seq IS NULL), coalesce(sum(length(value)) FILTER (WHERE taken_seq IS NULL), 0),
    coalesce(max(number), 0)
FROM unstuck_signals WHERE job_id = ?;

-- name: keep_signal
INSERT INTO unstuck_signals (job_id, number, name, value, at, sent_by) VALUES (?1, ?2, ?3, ?4, ?5, ?6);

-- name: wake_job
UPDATE unstuck_jobs
SET state = 'pending', ready = concurrency_key IS NULL, blocked = concurrency_key IS NOT NULL, scheduled = 0, awaits_signal = NULL, run_at = ?2
WHERE id = ?1 AND state = 'waiting';

-- name: journal
SELECT seq, kind, name, value, at, token FROM unstuck_journal WHERE job_id = ? ORDER BY seq;

-- name: journal_within
-- The largest values are left out. They are not read: only their sizes are.
SELECT j.seq, j.kind, j.name, CASE WHEN s.until_bytes <= ?2 THEN j.value ELSE x'' END, j.at, j.token
FROM unstuck_journal j
JOIN (
    SELECT seq, sum(length(value)) OVER (ORDER BY length(value), seq) AS until_bytes
    FROM unstuck_journal WHERE job_id = ?1
) s ON s.seq = j.seq
WHERE j.job_id = ?1 ORDER BY j.seq;

-- name: signals_within
SELECT g.number, g.name, CASE WHEN s.until_bytes <= ?2 THEN g.value ELSE x'' END, g.at, g.sent_by, g.taken_seq
FROM unstuck_signals g
JOIN (
    SELECT number, sum(length(value)) OVER (ORDER BY length(value), number) AS until_bytes
    FROM unstuck_signals WHERE job_id = ?1
) s ON s.number = g.number
WHERE g.job_id = ?1 ORDER BY g.number;

-- name: signals
SELECT number, name, value, at, sent_by, taken_seq FROM unstuck_signals WHERE job_id = ? ORDER BY number;

-- Requests that must not be done twice.

-- name: clear_requests
-- Whoever comes clears away a few that are too old: so the table stays as small as what comes in.
DELETE FROM unstuck_requests WHERE key IN (SELECT key FROM unstuck_requests WHERE at < ?1 ORDER BY at LIMIT ?2);

-- name: find_request
-- The write lock is held from here to the insert, so nobody can come in between.
SELECT fingerprint, stored FROM unstuck_requests WHERE key = ?1 AND at >= ?2;

-- name: remember_request
INSERT OR REPLACE INTO unstuck_requests (key, fingerprint, at, stored) VALUES (?1, ?2, ?3, ?4);
