-- Workers that come through another door than Python's own.

-- name: foreign_worker
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner
FROM unstuck_workers w
LEFT JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ? AND w.door <> 'python';

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.door, w.owner
FROM unstuck_workers w
LEFT JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.name = ? AND w.door <> 'python'
ORDER BY w.state IN ('active', 'draining', 'suspect') DESC, w.created_at DESC
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
SET beat_at = ?2, running = coalesce(?3, running), processed = processed + ?4
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
