-- Requests that must not be done twice.

-- name: clear_requests
-- Whoever comes clears away a few that are too old: so the table stays as small as what comes in.
DELETE FROM unstuck_requests WHERE key IN (SELECT key FROM unstuck_requests WHERE at < ?1 ORDER BY at LIMIT ?2);

-- name: find_request
-- The write lock is held from here to the insert, so nobody can come in between.
SELECT fingerprint, stored FROM unstuck_requests WHERE key = ?1 AND at >= ?2;

-- name: remember_request
INSERT OR REPLACE INTO unstuck_requests (key, fingerprint, at, stored) VALUES (?1, ?2, ?3, ?4);
