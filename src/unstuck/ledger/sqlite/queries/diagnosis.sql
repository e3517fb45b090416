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
        SELECT task, id, run_at, state FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
        WHERE scheduled = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at DESC LIMIT 20 * ?4
    ) WHERE state = 'pending' ORDER BY run_at DESC LIMIT ?4
)
GROUP BY task ORDER BY count(*) DESC, task LIMIT ?5;

-- name: look_coming
-- Those that are due next; beside min() SQLite gives the id of the row that has it.
SELECT task, count(*), id, min(run_at) - ?2
FROM (
    SELECT task, id, run_at FROM (
        SELECT task, id, run_at, state FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
        WHERE scheduled = 1 AND queue = ?1 AND run_at > ?2 + ?3 ORDER BY run_at LIMIT 20 * ?4
    ) WHERE state = 'pending' ORDER BY run_at LIMIT ?4
)
GROUP BY task ORDER BY min(run_at), task LIMIT ?5;

-- name: look_overdue
SELECT task, count(*), min(id), max(?2 - run_at)
FROM (
    SELECT task, id, run_at FROM unstuck_jobs INDEXED BY unstuck_jobs_scheduled
    WHERE scheduled = 1 AND queue = ?1 AND run_at < ?2 - ?3 ORDER BY run_at LIMIT ?4
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

-- name: look_retention
-- By how long the oldest row of each kind is past its retention, if it is. Ids go with time: the first jobs and events
-- tell it. What ended in a workflow that is open may still be needed. Jobs with a time of their own, and unique keys, are
-- found in their indexes; the first jumps from time to time.
WITH RECURSIVE own (retain_s) AS (
    SELECT min(retain_s) FROM unstuck_jobs INDEXED BY unstuck_jobs_kept WHERE retain_s IS NOT NULL AND finished_at IS NOT NULL
    UNION ALL
    SELECT (
        SELECT min(j.retain_s) FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
        WHERE j.retain_s IS NOT NULL AND j.finished_at IS NOT NULL AND j.retain_s > own.retain_s
    )
    FROM own
    WHERE own.retain_s IS NOT NULL
),
late (kind, past_s) AS (
    SELECT 'jobs', ?1 - j.finished_at - max(?2, coalesce(j.retain_s, 0))
    FROM (SELECT finished_at, retain_s, workflow_id FROM unstuck_jobs ORDER BY id LIMIT ?4) j
    WHERE j.workflow_id IS NULL
        OR NOT EXISTS (SELECT 1 FROM unstuck_workflows w WHERE w.id = j.workflow_id AND w.finished_at IS NULL)
    UNION ALL
    SELECT 'jobs', (
        SELECT ?1 - j.finished_at - o.retain_s FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
        WHERE j.retain_s = o.retain_s AND j.finished_at IS NOT NULL AND j.workflow_id IS NULL
        ORDER BY j.finished_at LIMIT 1
    )
    FROM (SELECT retain_s FROM own WHERE retain_s IS NOT NULL LIMIT ?5) o
    UNION ALL
    SELECT 'events', ?1 - e.at - ?3 FROM (SELECT at FROM unstuck_events ORDER BY id LIMIT ?4) e
    UNION ALL
    SELECT 'keys', ?1 - k.until FROM (SELECT until FROM unstuck_unique_keys ORDER BY until LIMIT 1) k
)
SELECT kind, max(past_s) FROM late GROUP BY kind HAVING max(past_s) > 0 ORDER BY kind;

-- name: look_watch
-- About 200 rows, 2,000 at most: the ledger keeps no more.
SELECT cause, since, gap_s, set_back_s, set_back_at FROM unstuck_watch_periods ORDER BY id DESC;
