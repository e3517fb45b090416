-- Who is switched off, and by what health is judged.

-- name: disabled_host
SELECT disabled FROM unstuck_hosts WHERE name = ? AND disabled IS NOT NULL;

-- name: hosts
SELECT name, disabled FROM unstuck_hosts ORDER BY name;

-- name: standings
SELECT
    w.id, w.name, w.host, w.state, w.queues, w.tasks, w.metadata, w.disabled, h.disabled,
    w.request IS NOT NULL OR w.draining, w.suspect_after_s, b.beat_at, w.stopped_at,
    json_extract(w.verdict, '$.detector'), w.door, w.recovery
FROM unstuck_workers w
LEFT JOIN unstuck_beats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.state IN ('active', 'draining', 'suspect') OR w.stopped_at > max(?, coalesce(h.enabled_at, 0))
ORDER BY w.id;

-- name: unserved_without
-- The queues that nobody else would serve: neither this worker nor anybody of this host. Asked under the write lock,
-- so that of two who switch off two at once the second one sees what the first one did.
SELECT q.value
FROM unstuck_workers w, json_each(w.queues) q
WHERE (w.id = ?1 OR w.host = ?2) AND w.state IN ('active', 'draining', 'suspect')
    AND NOT EXISTS (
        SELECT 1
        FROM unstuck_workers o
        JOIN unstuck_beats b ON b.worker_id = o.id
        LEFT JOIN unstuck_hosts h ON h.name = o.host
        WHERE o.id <> w.id AND (?2 IS NULL OR o.host <> ?2)
            AND o.state = 'active' AND o.request IS NULL AND o.disabled IS NULL AND h.disabled IS NULL
            AND b.beat_at > ?3 - o.suspect_after_s
            AND EXISTS (SELECT 1 FROM json_each(o.queues) s WHERE s.value = q.value)
            AND NOT EXISTS (SELECT value FROM json_each(w.tasks) EXCEPT SELECT value FROM json_each(o.tasks))
    )
LIMIT 1;

-- name: disable
-- What a person says stands above what was done by itself, which the reaper may take back.
UPDATE unstuck_workers SET disabled = ?2
WHERE id = ?1 AND state IN ('active', 'draining', 'suspect')
    AND (disabled IS NULL OR json_extract(disabled, '$.auto') AND NOT json_extract(?2, '$.auto'));

-- name: enable
-- The health that it reported goes with it: else it would be switched off again at once.
UPDATE unstuck_workers SET disabled = NULL, metadata = json_remove(metadata, '$.health')
WHERE id = ? AND disabled IS NOT NULL;

-- name: disable_host
INSERT INTO unstuck_hosts (name, disabled) VALUES (?1, ?2)
ON CONFLICT (name) DO UPDATE SET disabled = excluded.disabled
WHERE disabled IS NULL OR json_extract(disabled, '$.auto') AND NOT json_extract(excluded.disabled, '$.auto');

-- name: enable_host
UPDATE unstuck_hosts SET disabled = NULL, enabled_at = ?2 WHERE name = ?1 AND disabled IS NOT NULL;

-- name: forget_health_of_host
UPDATE unstuck_workers SET metadata = json_remove(metadata, '$.health')
WHERE host = ? AND state IN ('active', 'draining', 'suspect');
