-- Statements of maintenance: tickets, due jobs, retention, and ids after a restore.

-- name: ticket
SELECT until_boot_s, boot_id FROM unstuck_tickets WHERE name = ?;

-- name: take_ticket
-- One row per name; whoever finds it run out takes it, and nobody has to give it back.
INSERT INTO unstuck_tickets (name, until_boot_s, boot_id) VALUES (?1, ?2 + ?4, ?3)
ON CONFLICT (name) DO UPDATE SET until_boot_s = excluded.until_boot_s, boot_id = excluded.boot_id
WHERE until_boot_s <= ?2 OR boot_id <> ?3 OR until_boot_s > ?2 + 86400;

-- name: waiting_queues
-- Jumps from queue to queue in the index instead of reading a million scheduled jobs.
WITH RECURSIVE found (name) AS (
    SELECT min(queue) FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled WHERE scheduled = 1
    UNION ALL
    SELECT (
        SELECT min(j.queue)
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_scheduled
        WHERE j.scheduled = 1 AND j.queue > found.name
    )
    FROM found
    WHERE found.name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL;

-- name: promote_due
UPDATE unstuck_jobs
SET state = 'pending', ready = concurrency_key IS NULL, blocked = concurrency_key IS NOT NULL, scheduled = 0, awaits_signal = NULL
WHERE id IN (
    SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
    WHERE scheduled = 1 AND queue = ?1 AND run_at <= ?2
    ORDER BY run_at
    LIMIT ?3
)
RETURNING concurrency_key;

-- name: clock
SELECT boot_id, ahead_s FROM unstuck_clock;

-- name: note_clock
INSERT INTO unstuck_clock (one, boot_id, ahead_s) VALUES (1, ?1, ?2)
ON CONFLICT (one) DO UPDATE SET boot_id = ?1, ahead_s = ?2;

-- name: set_back_retries
-- Those due soonest of one queue. Where a caller named the time of a job, it stays.
UPDATE unstuck_jobs SET run_at = max(?2, run_at - ?3)
WHERE id IN (
    SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
    WHERE scheduled = 1 AND queue = ?1 AND run_at > ?2 AND state = 'pending' AND attempt > 0
    ORDER BY run_at
    LIMIT ?4
);

-- name: set_back_ends_of_retries
-- The attempts before those retries, so that no one moves them again.
UPDATE unstuck_attempts SET ended_at = min(?2, ended_at - ?3)
WHERE ended_at > ?2 AND job_id IN (
    SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
    WHERE scheduled = 1 AND queue = ?1 AND run_at > ?2 AND state = 'pending' AND attempt > 0
    ORDER BY run_at
    LIMIT ?4
);

-- name: retries_of_future
-- Retries whose last attempt ended in the future of the clock: it was set back, and no reaper saw by how much.
SELECT w.id, max(a.ended_at)
FROM (
    SELECT id, state, attempt FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
    WHERE scheduled = 1 AND queue = ?1 AND run_at > ?2
    ORDER BY run_at
    LIMIT ?4
) w
CROSS JOIN unstuck_attempts a ON a.job_id = w.id
WHERE w.state = 'pending' AND w.attempt > 0 AND a.ended_at > ?2 + ?3
GROUP BY w.id;

-- name: set_back_retry
UPDATE unstuck_jobs SET run_at = max(?2, run_at - ?3) WHERE id = ?1 AND scheduled = 1 AND run_at > ?2;

-- name: set_back_ends
UPDATE unstuck_attempts SET ended_at = min(?2, ended_at - ?3) WHERE job_id = ?1 AND ended_at > ?2;

-- name: began_in_future
SELECT EXISTS (
    SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1 AND started_at > ?
);

-- name: set_back_beginnings
-- A job that began in the future of the clock would run past its deadline for as long.
UPDATE unstuck_jobs SET started_at = min(?1, started_at - ?2), claimed_at = min(?1, claimed_at - ?2)
WHERE id IN (
    SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1 AND started_at > ?1 + ?3 LIMIT ?4
);

-- name: set_back_conditions
UPDATE unstuck_conditions
SET seen_at = min(seen_at, ?1), begun_at = min(begun_at, ?1), reminded_at = min(reminded_at, ?1)
WHERE seen_at > ?1 OR begun_at > ?1 OR reminded_at > ?1;

-- name: sweep_position
SELECT swept_job_id FROM unstuck_ledger;

-- name: set_sweep_position
UPDATE unstuck_ledger SET swept_job_id = ?;

-- name: finished_window
-- Walks a bounded stretch of ids instead of needing an index that every job would pay for.
SELECT id, finished_at, state, retain_s, enqueued_at FROM unstuck_jobs WHERE id > ?1 ORDER BY id LIMIT ?2;

-- name: delete_jobs
DELETE FROM unstuck_jobs WHERE id IN (SELECT value FROM json_each(?)) AND finished_at IS NOT NULL;

-- name: ledger_id
SELECT id FROM unstuck_ledger;

-- name: sweep_events
-- Ids go with time: looking at the first few is enough. An event from the future (the clock was set back) is passed over.
DELETE FROM unstuck_events
WHERE id IN (SELECT id FROM unstuck_events WHERE at <= ?3 ORDER BY id LIMIT ?2) AND at < ?1;

-- name: sweep_workers
-- The tombstone stays until everything that the worker held is settled.
DELETE FROM unstuck_workers
WHERE id IN (
    SELECT w.id
    FROM unstuck_workers w
    WHERE w.state IN ('dead', 'stopped') AND w.stopped_at < ?1
        AND NOT EXISTS (
            SELECT 1 FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id
        )
    LIMIT ?2
);

-- name: living_worker_ids
SELECT id FROM unstuck_workers WHERE state IN ('active', 'draining', 'suspect') ORDER BY id;

-- name: release_all_claimed
UPDATE unstuck_jobs
SET state = 'pending', ready = 1, held = 0, token = NULL, worker_id = NULL, claimed_at = NULL
WHERE held = 1 AND state = 'claimed';

-- name: running_job_ids
SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1 AND state = 'running' ORDER BY id;

-- name: replace_token
UPDATE unstuck_jobs SET token = ?2 WHERE id = ?1 AND state = 'running';

-- name: last_numbers
SELECT last_job_id, last_token FROM unstuck_ledger;

-- name: set_last_numbers
UPDATE unstuck_ledger SET last_job_id = ?1, last_token = ?2;

-- name: last_row_number
SELECT seq FROM sqlite_sequence WHERE name = ?;

-- name: forget_row_number
DELETE FROM sqlite_sequence WHERE name = ?;

-- name: set_row_number
INSERT INTO sqlite_sequence (name, seq) VALUES (?1, ?2);
