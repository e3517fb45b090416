-- Workers that come through another door than Python's own.

-- name: foreign_worker
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner,
    w.running_stale_after_s, w.recovery,
    (
        SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    )
FROM unstuck_workers w
LEFT JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ? AND w.door <> 'python';

-- name: fates
-- The row of a job tells of its last attempt, the others are kept apart. Joined by keys alone.
WITH asked AS (
    SELECT key AS place, json_extract(value, '$[0]') AS job_id, json_extract(value, '$[1]') AS token FROM json_each(?)
)
SELECT
    u.job_id, u.token, j.state, j.token, j.worker_id, w.name, coalesce(j.attempt, 0), j.started_at, j.finished_at,
    j.error_code,
    coalesce(a.worker_id, iif(j.token = u.token, j.worker_id, NULL)),
    coalesce(a.state, iif(j.token = u.token AND j.finished_at IS NOT NULL, coalesce(j.ended_as, j.state), NULL)),
    coalesce(a.code, iif(j.token = u.token AND j.finished_at IS NOT NULL, j.error_code, NULL))
FROM asked u
LEFT JOIN unstuck_jobs j ON j.id = u.job_id
LEFT JOIN unstuck_attempts a ON a.job_id = u.job_id AND a.token = u.token
LEFT JOIN unstuck_workers w ON w.id = j.worker_id AND w.door <> 'python'
ORDER BY u.place;

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner,
    w.running_stale_after_s, w.recovery,
    (
        SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    )
FROM unstuck_workers w
LEFT JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.name = ? AND w.door <> 'python'
ORDER BY w.state IN ('active', 'draining', 'suspect') DESC, w.created_at DESC
LIMIT 1;

-- name: living_python_worker
SELECT id FROM unstuck_workers
WHERE name = ? AND door = 'python' AND state IN ('active', 'draining', 'suspect')
LIMIT 1;

-- name: foreign_pulse
SELECT w.state, w.draining, w.request, w.boot_id, w.disabled IS NOT NULL OR h.disabled IS NOT NULL
FROM unstuck_workers w
JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ? AND w.door <> 'python';

-- name: beat_foreign
-- One narrow row, updated in place. Never an insert: a worker whose row is gone is dead.
UPDATE unstuck_beats
SET beat_at = max(?2, coalesce((SELECT until FROM unstuck_watch_periods ORDER BY id DESC LIMIT 1), ?2)),
    running = coalesce(?3, running), processed = processed + ?4
WHERE worker_id = ?1;

-- name: move_to_this_boot
-- It outlived a restart of this machine, and is heard in another boot now.
UPDATE unstuck_workers SET boot_id = ?2 WHERE id = ?1;

-- name: restart_deadlines
-- What it runs has run since by the clock on the wall; the boot clock began anew.
UPDATE unstuck_jobs SET started_boot_s = ?2 - (?3 - started_at)
WHERE held = 1 AND worker_id = ?1 AND started_at IS NOT NULL;

-- name: listeners
SELECT address FROM unstuck_listeners;

-- name: add_listener
INSERT INTO unstuck_listeners (address) VALUES (?) ON CONFLICT DO NOTHING;

-- name: remove_listener
DELETE FROM unstuck_listeners WHERE address = ?;
