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

-- name: schedules
SELECT name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, paused, paused_by, next_at, last_at,
    fired_at, last_job_id, version, changed_at
FROM unstuck_schedules
ORDER BY name;

-- name: due_schedules
SELECT name, source, fingerprint, task, queue, cron, every_s, zone, catch_up, job, paused, paused_by, next_at, last_at,
    fired_at, last_job_id, version, changed_at
FROM unstuck_schedules
WHERE paused = 0 AND (source = 'operator' OR fingerprint IN (SELECT value FROM json_each(?1)))
    AND (
        next_at IS NULL OR next_at <= ?2
        OR last_at > ?2 + CASE WHEN every_s IS NULL THEN ?3 ELSE min(?3, max(?5, ?6 * every_s)) END
    )
ORDER BY next_at, name
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
