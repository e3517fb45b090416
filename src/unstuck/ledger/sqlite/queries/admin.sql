-- Tokens of the web door.

-- name: add_api_token
INSERT INTO unstuck_api_tokens (id, name, hash, seal, scopes, created_at, created_by, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: api_tokens
-- Asked twice a second while anybody comes in: people make few tokens.
SELECT id, name, hash, seal, scopes, created_at, created_by, expires_at, revoked_at
FROM unstuck_api_tokens
ORDER BY created_at, id;

-- name: revoke_api_token
UPDATE unstuck_api_tokens SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL;

-- What operators did.

-- name: begin_audit
INSERT INTO unstuck_audit (at, by, transport, verb, target) VALUES (?, ?, ?, ?, ?) RETURNING id;

-- name: end_audit
UPDATE unstuck_audit SET outcome = ?2 WHERE id = ?1;

-- name: audit
SELECT id, at, by, transport, verb, target, outcome
FROM unstuck_audit
WHERE ?1 IS NULL OR id < ?1
ORDER BY id DESC
LIMIT ?2;

-- name: sweep_audit
-- Ids go with time: looking at the first few is enough.
DELETE FROM unstuck_audit
WHERE id IN (SELECT f.id FROM (SELECT id, at FROM unstuck_audit ORDER BY id LIMIT ?2) f WHERE f.at < ?1);

-- What was counted, and the fleet in a few numbers.

-- name: count
INSERT INTO unstuck_counters (minute, name, labels, value) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (minute, name, labels) DO UPDATE SET value = value + excluded.value;

-- name: counters
SELECT name, labels, value FROM unstuck_counters WHERE minute = 0 ORDER BY name, labels;

-- name: counter_series
SELECT minute, name, labels, value
FROM unstuck_counters
WHERE minute >= max(?1, 1) AND name IN (SELECT value FROM json_each(?2))
ORDER BY minute, name, labels;

-- name: counter_sums
SELECT name, labels, sum(value)
FROM unstuck_counters
WHERE minute >= max(?1, 1) AND name = ?2
GROUP BY name, labels
ORDER BY labels;

-- name: sweep_counters
DELETE FROM unstuck_counters
WHERE (minute, name, labels) IN (
    SELECT minute, name, labels FROM unstuck_counters WHERE minute > 0 AND minute < ?1 ORDER BY minute LIMIT ?2
);

-- name: fleet
SELECT w.state, b.beat_at, w.heartbeat_interval_s
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id;
