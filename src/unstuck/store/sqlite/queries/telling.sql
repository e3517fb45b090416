-- What those who listen need.

-- name: glance
SELECT j.id, j.state, j.attempt, j.token, j.worker_id
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value;

-- name: unserved
-- Pairs of queue and task that no worker would take now, whatever the reason is.
SELECT p.value ->> 0, p.value ->> 1
FROM json_each(?1) p
WHERE NOT EXISTS (
    SELECT 1
    FROM unstuck_workers w
    JOIN unstuck_beats b ON b.worker_id = w.id
    LEFT JOIN unstuck_hosts h ON h.name = w.host
    WHERE w.state = 'active' AND w.request IS NULL AND w.disabled IS NULL AND h.disabled IS NULL
        AND b.beat_at > ?2 - w.suspect_after_s
        AND EXISTS (SELECT 1 FROM json_each(w.queues) q WHERE q.value = p.value ->> 0)
        AND EXISTS (SELECT 1 FROM json_each(w.tasks) t WHERE t.value = p.value ->> 1)
);
