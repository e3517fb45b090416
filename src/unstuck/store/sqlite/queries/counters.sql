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
LEFT JOIN unstuck_beats b ON b.worker_id = w.id;
