-- Lines, limits of queues, keys that are kept for a period, expiry and what is kept for a time of its own.

-- name: places_of
SELECT places FROM unstuck_concurrency_keys WHERE key = ?;

-- name: open_line
-- With the number that whoever stands first in it brought along.
INSERT INTO unstuck_concurrency_keys (key, places, changed_at)
SELECT ?1, coalesce(
    (SELECT concurrency_limit FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked
     WHERE blocked = 1 AND concurrency_key = ?1 AND concurrency_limit IS NOT NULL ORDER BY rank, id LIMIT 1), 1), ?2
RETURNING places;

-- name: set_places
-- The last word wins, but not over an operator's.
INSERT INTO unstuck_concurrency_keys (key, places, changed_at) VALUES (?1, ?2, ?3)
ON CONFLICT (key) DO UPDATE SET places = ?2, changed_at = ?3 WHERE pinned_by IS NULL AND places <> ?2;

-- name: pin_places
INSERT INTO unstuck_concurrency_keys (key, places, pinned_by, changed_at) VALUES (?1, coalesce(?2, 1), ?3, ?4)
ON CONFLICT (key) DO UPDATE SET places = coalesce(?2, places), pinned_by = ?3, changed_at = ?4;

-- name: count_in_line
SELECT count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_in_concurrency_key WHERE concurrency_key = ?1 AND (ready = 1 OR held = 1);

-- name: count_blocked
SELECT count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 AND concurrency_key = ?;

-- name: let_in
UPDATE unstuck_jobs SET blocked = 0, ready = 1
WHERE id IN (
    SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 AND concurrency_key = ?1 ORDER BY rank, id LIMIT ?2
)
RETURNING queue;

-- name: lines_left
-- The lines of jobs whose attempts ended, and their queues where these have a limit.
SELECT DISTINCT j.concurrency_key, CASE WHEN k.concurrency IS NOT NULL THEN j.queue END
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
LEFT JOIN unstuck_queues k ON k.name = j.queue
WHERE j.concurrency_key IS NOT NULL OR k.concurrency IS NOT NULL;

-- name: lines_after
SELECT key FROM unstuck_concurrency_keys WHERE key > ?1 ORDER BY key LIMIT ?2;

-- name: next_blocked_line
SELECT concurrency_key FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 AND concurrency_key > ? ORDER BY concurrency_key LIMIT 1;

-- name: close_line
DELETE FROM unstuck_concurrency_keys
WHERE key = ?1 AND pinned_by IS NULL
    AND NOT EXISTS (SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_blocked WHERE blocked = 1 AND concurrency_key = ?1)
    AND NOT EXISTS (
        SELECT 1 FROM unstuck_jobs INDEXED BY unstuck_jobs_in_concurrency_key WHERE concurrency_key = ?1 AND (ready = 1 OR held = 1)
    );

-- name: lines
SELECT
    l.key, l.places, l.pinned_by,
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_blocked WHERE j.blocked = 1 AND j.concurrency_key = l.key),
    (SELECT json_group_array(json_array(j.id, j.state, j.queue)) FROM unstuck_jobs j INDEXED BY unstuck_jobs_in_concurrency_key
     WHERE j.concurrency_key = l.key AND (j.ready = 1 OR j.held = 1))
FROM unstuck_concurrency_keys l
WHERE ?1 IS NULL OR l.key = ?1
ORDER BY l.key
LIMIT ?2;

-- name: queue_limits
SELECT name, concurrency, rate, rate_window_s, tokens, refilled_at, limited_by FROM unstuck_queues
WHERE concurrency IS NOT NULL OR rate IS NOT NULL OR limited_by IS NOT NULL
ORDER BY name;

-- name: count_held_of_queue
SELECT count(*) FROM unstuck_jobs INDEXED BY unstuck_jobs_held WHERE held = 1 AND queue = ?;

-- name: spend_tokens
UPDATE unstuck_queues SET tokens = ?2, refilled_at = ?3 WHERE name = ?1;

-- name: tie_to_limit
-- Whoever frees a place in a limited queue tells others of it.
UPDATE unstuck_jobs SET has_links = 1 WHERE id IN (SELECT value FROM json_each(?)) AND has_links = 0;

-- name: declare_limit
-- What an operator chose stands.
INSERT INTO unstuck_queues (name, concurrency, rate, rate_window_s) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (name) DO UPDATE SET concurrency = ?2, rate = ?3, rate_window_s = ?4, tokens = NULL
WHERE limited_by IS NULL AND (concurrency IS NOT ?2 OR rate IS NOT ?3 OR rate_window_s IS NOT ?4);

-- name: limit_queue
INSERT INTO unstuck_queues (name, concurrency, rate, rate_window_s, limited_by) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (name) DO UPDATE SET concurrency = ?2, rate = ?3, rate_window_s = ?4, limited_by = ?5, tokens = NULL;

-- name: keep_key
INSERT INTO unstuck_unique_keys (key, job_id, until) VALUES (?1, ?2, ?3)
ON CONFLICT (key) DO UPDATE SET job_id = ?2, until = ?3;

-- name: find_kept_key
SELECT job_id FROM unstuck_unique_keys WHERE key = ?1 AND until > ?2;

-- name: displace_job
UPDATE unstuck_jobs
SET state = 'cancelled', ready = 0, scheduled = 0, blocked = 0, finished_at = ?2, active_key = NULL, error_code = 'CANCELLED',
    error_message = 'Job was cancelled', error_cause = ?3, error_details = NULL
WHERE id = ?1 AND state = 'pending'
RETURNING has_links;

-- name: free_key
UPDATE unstuck_jobs SET active_key = NULL WHERE id IN (SELECT value FROM json_each(?));

-- name: expired
SELECT id FROM unstuck_jobs INDEXED BY unstuck_jobs_expiring
WHERE expires_at IS NOT NULL AND (ready = 1 OR scheduled = 1 OR blocked = 1) AND expires_at <= ?1
ORDER BY expires_at
LIMIT ?2;

-- name: next_expiry
SELECT expires_at FROM unstuck_jobs INDEXED BY unstuck_jobs_expiring
WHERE expires_at IS NOT NULL AND (ready = 1 OR scheduled = 1 OR blocked = 1)
ORDER BY expires_at
LIMIT 1;

-- name: expire_job
UPDATE unstuck_jobs
SET state = 'cancelled', ready = 0, scheduled = 0, blocked = 0, finished_at = ?2, active_key = NULL, error_code = 'EXPIRED',
    error_message = 'Job expired before it began',
    error_cause = format(
        'it waited for %s s and was good for %s s',
        rtrim(rtrim(format('%.1f', ?2 - run_at), '0'), '.'), rtrim(rtrim(format('%.1f', expires_at - run_at), '0'), '.')
    ),
    error_details = NULL
WHERE id = ?1 AND state = 'pending' AND expires_at <= ?2
RETURNING has_links, error_cause;

-- name: next_keep_s
SELECT retain_s FROM unstuck_jobs INDEXED BY unstuck_jobs_kept
WHERE retain_s IS NOT NULL AND finished_at IS NOT NULL AND retain_s > ?
ORDER BY retain_s
LIMIT 1;

-- name: kept_long_enough
-- Those of open workflows are passed over, or they would stand before all others.
SELECT id FROM unstuck_jobs j INDEXED BY unstuck_jobs_kept
WHERE retain_s = ?1 AND finished_at IS NOT NULL AND finished_at < ?2
    AND (
        workflow_id IS NULL
        OR NOT EXISTS (SELECT 1 FROM unstuck_workflows w WHERE w.id = j.workflow_id AND w.finished_at IS NULL)
    )
ORDER BY finished_at
LIMIT ?3;

-- name: sweep_kept_keys
DELETE FROM unstuck_unique_keys WHERE key IN (SELECT key FROM unstuck_unique_keys WHERE until < ?1 ORDER BY until LIMIT ?2);

-- name: ties
SELECT concurrency_key, concurrency_limit, blocked, expires_at, retain_s, unique_for, workflow_id, place, awaits_signal FROM unstuck_jobs WHERE id = ?;
