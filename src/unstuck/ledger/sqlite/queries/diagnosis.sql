-- What the doctor looks at. Nothing here changes anything, and every look has an end.

-- name: ready_queues
-- Jumps from queue to queue in the index instead of reading a million ready jobs.
WITH RECURSIVE found (name) AS (
    SELECT min(queue) FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1
    UNION ALL
    SELECT (
        SELECT min(j.queue)
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_ready
        WHERE j.ready = 1 AND j.queue > found.name
    )
    FROM found
    WHERE found.name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL LIMIT ?1;

-- name: count_ready_of
SELECT count(*) FROM (
    SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_ready WHERE ready = 1 AND queue = ?1 LIMIT ?2
);

-- name: look_ready
-- Both ends of one queue, in the order of claims.
SELECT id, task, run_at
FROM (
    SELECT id, task, rank, run_at FROM (
        SELECT id, task, rank, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
        WHERE ready = 1 AND queue = ?1 ORDER BY rank, id LIMIT ?2
    )
    UNION
    SELECT id, task, rank, run_at FROM (
        SELECT id, task, rank, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_ready
        WHERE ready = 1 AND queue = ?1 ORDER BY rank DESC, id DESC LIMIT ?2
    )
)
ORDER BY rank, id;

-- name: look_scheduled
SELECT task, count(*), min(id), max(run_at - ?2)
FROM (
    -- Jobs that sleep, or wait for a signal with a timeout, are not scheduled. A bounded number of them is passed over.
    SELECT task, id, run_at FROM (
        SELECT task, id, run_at, state FROM unstuck_jobs INDEXED BY unstuck_jobs_waiting
        WHERE waiting = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at DESC LIMIT 20 * ?4
    ) WHERE state = 'pending' ORDER BY run_at DESC LIMIT ?4
)
GROUP BY task ORDER BY count(*) DESC, task LIMIT ?5;

-- name: look_coming
-- Those that are due next; beside min() SQLite gives the id of the row that has it.
SELECT task, count(*), id, min(run_at) - ?2
FROM (
    SELECT task, id, run_at FROM (
        SELECT task, id, run_at, state FROM unstuck_jobs INDEXED BY unstuck_jobs_waiting
        WHERE waiting = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at LIMIT 20 * ?4
    ) WHERE state = 'pending' ORDER BY run_at LIMIT ?4
)
GROUP BY task ORDER BY min(run_at), task LIMIT ?5;

-- name: look_overdue
SELECT task, count(*), min(id), max(?2 - run_at)
FROM (
    SELECT task, id, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_waiting
    WHERE waiting = 1 AND queue = ?1 AND run_at < ?2 - ?3 ORDER BY run_at LIMIT ?4
)
GROUP BY task ORDER BY count(*) DESC, task LIMIT ?5;

-- name: look_quarantined
-- By the index of what went wrong: this error means this state.
SELECT queue, task, count(*), max(id)
FROM (
    SELECT queue, task, id, state FROM unstuck_jobs INDEXED BY unstuck_jobs_error
    WHERE error_code IS NOT NULL AND error_code = 'CRASHED_TOO_OFTEN' ORDER BY id DESC LIMIT ?1
)
WHERE state = 'quarantined'
GROUP BY queue, task ORDER BY count(*) DESC, queue, task LIMIT ?2;

-- name: look_jobs_before
SELECT max(id) FROM unstuck_jobs WHERE id < ?;

-- name: look_events_before
SELECT max(id) FROM unstuck_events WHERE id < ?;

-- name: look_jobs_from
-- How long each is past its retention; NULL where it has not ended, or others of its workflow may still need it.
SELECT
    j.id, ?3 - j.enqueued_at,
    CASE
        WHEN j.workflow_id IS NULL
            OR NOT EXISTS (SELECT 1 FROM unstuck_workflows w WHERE w.id = j.workflow_id AND w.finished_at IS NULL)
            THEN ?3 - j.finished_at - max(?4, coalesce(j.keep_s, 0))
    END
FROM unstuck_jobs j
WHERE j.id >= ?1
ORDER BY j.id
LIMIT ?2;

-- name: look_events_from
SELECT id, ?3 - at, ?3 - at - ?4 FROM unstuck_events WHERE id >= ?1 ORDER BY id LIMIT ?2;

-- name: look_own_keep
-- Jobs past a time of their own, by that time: how many, and how long the oldest is. Jumps from time to time in the index.
WITH RECURSIVE found (keep_s) AS (
    SELECT min(keep_s) FROM unstuck_jobs INDEXED BY unstuck_jobs_kept WHERE keep_s IS NOT NULL AND finished_at IS NOT NULL
    UNION ALL
    SELECT (
        SELECT min(j.keep_s) FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
        WHERE j.keep_s IS NOT NULL AND j.finished_at IS NOT NULL AND j.keep_s > found.keep_s
    )
    FROM found
    WHERE found.keep_s IS NOT NULL
)
SELECT
    (SELECT count(*) FROM (
        SELECT 1 FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
        WHERE j.keep_s = f.keep_s AND j.finished_at IS NOT NULL AND j.finished_at < ?1 - f.keep_s AND j.workflow_id IS NULL
        LIMIT ?3)),
    (SELECT max(0, ?1 - f.keep_s - j.finished_at) FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
     WHERE j.keep_s = f.keep_s AND j.finished_at IS NOT NULL AND j.workflow_id IS NULL
     ORDER BY j.finished_at LIMIT 1)
FROM found f
WHERE f.keep_s IS NOT NULL
LIMIT ?2;

-- name: look_expired_keys
SELECT
    (SELECT count(*) FROM (SELECT 1 FROM unstuck_kept_keys WHERE until < ?1 LIMIT ?2)),
    (SELECT ?1 - until FROM unstuck_kept_keys ORDER BY until LIMIT 1);

-- name: look_watch
-- About 200 rows, 2,000 at most: the ledger keeps no more.
SELECT cause, since, gap_s, set_back_s, set_back_at FROM unstuck_watch_periods ORDER BY id DESC;
