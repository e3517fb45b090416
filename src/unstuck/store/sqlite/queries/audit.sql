-- What operators did.

-- name: begin_audit
INSERT INTO unstuck_audit (at, by, door, verb, target) VALUES (?, ?, ?, ?, ?) RETURNING id;

-- name: end_audit
UPDATE unstuck_audit SET outcome = ?2 WHERE id = ?1;

-- name: audit
SELECT id, at, by, door, verb, target, outcome
FROM unstuck_audit
WHERE ?1 IS NULL OR id < ?1
ORDER BY id DESC
LIMIT ?2;

-- name: sweep_audit
-- Ids go with time: looking at the first few is enough.
DELETE FROM unstuck_audit
WHERE id IN (SELECT f.id FROM (SELECT id, at FROM unstuck_audit ORDER BY id LIMIT ?2) f WHERE f.at < ?1);
