-- Schedules: their definitions, and one enqueue per tick.

-- name: know_schedule
-- A definition that is known is left alone, so that its version stays. Where its times are the same it goes on where it
-- is; else it begins anew.
INSERT INTO unstuck_schedules (name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, changed_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
ON CONFLICT (name) DO UPDATE SET
    source = excluded.source, fingerprint = excluded.fingerprint, task = excluded.task, queue = excluded.queue,
    cron = excluded.cron, every_s = excluded.every_s, zone = excluded.zone, catch_up = excluded.catch_up,
    job = excluded.job, version = version + 1, changed_at = excluded.changed_at,
    next_at = iif(cron IS excluded.cron AND every_s IS excluded.every_s AND zone = excluded.zone, next_at, NULL)
WHERE source <> excluded.source OR fingerprint <> excluded.fingerprint;

-- name: differing_schedules
SELECT s.name, s.source, s.fingerprint, s.task, s.queue, s.cron, s.every_s, s.zone, s.catch_up, s.job, s.paused,
    s.paused_by, s.next_at, s.last_at, s.fired_at, s.last_job_id, s.version, s.changed_at,
    EXISTS (
        SELECT 1 FROM unstuck_workers w, json_each(w.metadata, '$.schedules') f
        WHERE w.state IN ('active', 'draining', 'suspect') AND w.transport = 'python' AND f.value = s.fingerprint
    )
FROM json_each(?) k
CROSS JOIN unstuck_schedules s ON s.name = k.key
WHERE s.source = 'app' AND s.fingerprint <> k.value
ORDER BY s.name;

-- name: restore_schedule
UPDATE unstuck_schedules SET
    fingerprint = ?2, task = ?3, queue = ?4, cron = ?5, every_s = ?6, zone = ?7, catch_up = ?8, job = ?9,
    version = version + 1, changed_at = ?10,
    next_at = iif(cron IS ?5 AND every_s IS ?6 AND zone = ?7, next_at, NULL)
WHERE name = ?1 AND source = 'app' AND fingerprint = ?11;

-- name: schedules
SELECT name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, paused, paused_by, next_at, last_at,
    fired_at, last_job_id, version, changed_at
FROM unstuck_schedules
ORDER BY name;

-- name: due_schedules
-- Those of ?7 come last, in that order: locks keep them from firing, and they must not take the places of others.
SELECT name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, paused, paused_by, next_at, last_at,
    fired_at, last_job_id, version, changed_at
FROM unstuck_schedules
WHERE paused = 0 AND (source = 'operator' OR fingerprint IN (SELECT value FROM json_each(?1)))
    AND (
        next_at IS NULL OR next_at <= ?2
        OR last_at > ?2 + CASE WHEN every_s IS NULL THEN ?3 ELSE min(?3, max(?5, ?6 * every_s)) END
    )
ORDER BY coalesce((SELECT a.key FROM json_each(?7) a WHERE a.value = name), -1), next_at, name
LIMIT ?4;

-- name: next_schedule
SELECT min(next_at) FROM unstuck_schedules
WHERE paused = 0 AND next_at > ?2 AND (source = 'operator' OR fingerprint IN (SELECT value FROM json_each(?1)));

-- name: fire_schedule
-- Only where it is still as it was read. Under the write lock, with the jobs.
UPDATE unstuck_schedules
SET next_at = ?3, last_at = coalesce(?4, last_at), fired_at = coalesce(?5, fired_at), version = version + 1
WHERE name = ?1 AND version = ?2 AND paused = 0;

-- name: note_last_job
UPDATE unstuck_schedules SET last_job_id = ?2 WHERE name = ?1;

-- name: pause_schedule
-- Whoever resumes it begins anew from then: what came due meanwhile was not wanted.
UPDATE unstuck_schedules
SET paused = ?2, paused_by = iif(?2, ?3, NULL), next_at = NULL, version = version + 1
WHERE name = ?1 AND paused <> ?2;

-- name: remove_schedule
DELETE FROM unstuck_schedules WHERE name = ?;
