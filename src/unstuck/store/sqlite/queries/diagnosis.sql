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
    SELECT task, id, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_waiting
    WHERE waiting = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at DESC LIMIT ?4
)
GROUP BY task ORDER BY count(*) DESC, task LIMIT ?5;

-- name: look_coming
-- Those that are due next; beside min() SQLite gives the id of the row that has it.
SELECT task, count(*), id, min(run_at) - ?2
FROM (
    SELECT task, id, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_waiting
    WHERE waiting = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at LIMIT ?4
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
