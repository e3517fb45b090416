-- What alerts are made of, and who was told.

-- name: add_alert_target
-- A new one hears of what happens from now on, not of history.
INSERT INTO unstuck_alert_targets (target, position) VALUES (?1, ?2)
ON CONFLICT (target) DO NOTHING;

-- name: alert_target
SELECT position, version, state FROM unstuck_alert_targets WHERE target = ?1;

-- name: save_alert_target
-- Only on what was read: of two who decide at once one finds the version gone.
UPDATE unstuck_alert_targets SET position = ?3, state = ?4, version = version + 1 WHERE target = ?1 AND version = ?2;

-- name: events_to_tell
-- What clients are told when they enqueue is `no_workers` too; the condition is the one that names its queue.
SELECT
    e.id, e.at, e.kind, e.message, e.about, e.job_id, j.task, j.queue, e.worker_id, w.name, w.host, w.verdict
FROM unstuck_events e INDEXED BY unstuck_events_to_tell
LEFT JOIN unstuck_jobs j ON j.id = e.job_id
LEFT JOIN unstuck_workers w ON w.id = e.worker_id
WHERE (e.job_id IS NULL OR e.kind IN ('quarantined', 'workflow_paused'))
    AND e.id > ?1
    AND e.kind IN (SELECT value FROM json_each(?2))
    AND e.id NOT IN (SELECT value FROM json_each(?3))
    AND (e.kind <> 'no_workers' OR e.about IS NOT NULL)
ORDER BY e.id
LIMIT ?4;

-- name: conditions
SELECT kind, about, message, seen_at, begun_at, reminded_at FROM unstuck_conditions ORDER BY kind, about;

-- name: see_condition
INSERT INTO unstuck_conditions (kind, about, message, seen_at) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (kind, about) DO NOTHING;

-- name: begin_condition
INSERT INTO unstuck_conditions (kind, about, message, seen_at, begun_at, reminded_at) VALUES (?1, ?2, ?3, ?4, ?4, ?4)
ON CONFLICT (kind, about) DO UPDATE
SET message = excluded.message, begun_at = excluded.begun_at, reminded_at = excluded.reminded_at
WHERE begun_at IS NULL;

-- name: remind_of_condition
UPDATE unstuck_conditions SET message = ?3, reminded_at = ?4 WHERE kind = ?1 AND about = ?2 AND reminded_at <= ?5;

-- name: end_condition
DELETE FROM unstuck_conditions WHERE kind = ?1 AND about = ?2 RETURNING begun_at;

-- name: look_fleet
SELECT
    w.id, w.name, w.host, w.state, w.queues, w.suspect_after_s, w.created_at,
    json_extract(w.metadata, '$.settings.check_interval_s'), w.disabled IS NULL AND h.disabled IS NULL,
    b.beat_at
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.state IN ('active', 'draining', 'suspect')
ORDER BY w.id;

-- name: look_held
SELECT EXISTS (SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1);

-- What those who listen need.

-- name: glance
SELECT j.id, j.state, j.attempt, j.token, j.worker_id
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value;

-- name: unserved
-- Pairs of queue and task that no worker would take which was heard lately, whatever the reason is.
SELECT p.value ->> 0, p.value ->> 1
FROM json_each(?1) p
WHERE NOT EXISTS (
    SELECT 1
    FROM unstuck_workers w
    JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
    LEFT JOIN unstuck_hosts h ON h.name = w.host
    WHERE w.state = 'active' AND w.request IS NULL AND w.disabled IS NULL AND h.disabled IS NULL
        AND b.beat_at > ?2 - w.suspect_after_s
        AND EXISTS (SELECT 1 FROM json_each(w.queues) q WHERE q.value = p.value ->> 0)
        AND EXISTS (SELECT 1 FROM json_each(w.tasks) t WHERE t.value = p.value ->> 1)
);

-- name: unheard
-- The other workers that may take jobs. Whether they are silent depends on how long someone kept watch since.
SELECT b.beat_at, w.suspect_after_s, w.queues, w.tasks
FROM unstuck_workers w
JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.state = 'active' AND w.request IS NULL AND w.disabled IS NULL AND h.disabled IS NULL
    AND b.beat_at <= ?1 - w.suspect_after_s;
