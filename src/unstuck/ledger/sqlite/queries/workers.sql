-- Workers: birth, beats, verdicts, end.

-- name: insert_worker
INSERT INTO unstuck_workers (
    id, name, host, pid, boot_id, pid_namespace, process_started, queues, tasks, concurrency, version,
    heartbeat_interval_s, suspect_after_s, running_stale_after_s, metadata, wakeup_address, status_page, transport, owner, recovery, state,
    created_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'active', ?)
-- The same worker again after a lost answer, or a second living foreign worker of the same name.
ON CONFLICT DO NOTHING;

-- name: insert_beat
-- Never before the last tick of a reaper, here and below: a clock that was set back and that no reaper has seen yet
-- would make it a heartbeat of long ago.
INSERT INTO unstuck_worker_heartbeats (worker_id, beat_at)
VALUES (?1, max(?2, coalesce((SELECT until FROM unstuck_watch_periods ORDER BY id DESC LIMIT 1), ?2)))
ON CONFLICT (worker_id) DO NOTHING;

-- name: know_task
INSERT INTO unstuck_tasks (name, queue, policy, is_async, seen_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE
SET queue = excluded.queue, policy = excluded.policy, is_async = excluded.is_async, seen_at = excluded.seen_at;

-- name: set_bell
UPDATE unstuck_workers SET wakeup_address = ?2 WHERE id = ?1;

-- name: bells
SELECT id, wakeup_address, queues FROM unstuck_workers WHERE wakeup_address <> '' AND state IN ('active', 'draining', 'suspect');

-- name: worker_standing
SELECT w.state, w.disabled IS NOT NULL OR h.disabled IS NOT NULL
FROM unstuck_workers w LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ?;

-- name: worker_pulse
SELECT
    w.state, w.draining, w.request, w.disabled IS NOT NULL OR h.disabled IS NOT NULL
FROM unstuck_workers w
JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ?;

-- name: beat
-- One narrow row, updated in place. Never an insert: a worker whose row is gone is dead.
UPDATE unstuck_worker_heartbeats
SET beat_at = max(?2, coalesce((SELECT until FROM unstuck_watch_periods ORDER BY id DESC LIMIT 1), ?2)),
    running = ?3, processed = ?4
WHERE worker_id = ?1;

-- name: watch_periods
SELECT since, until FROM unstuck_watch_periods ORDER BY id;

-- name: last_period
SELECT since, until FROM unstuck_watch_periods ORDER BY id DESC LIMIT 1;

-- name: extend_watch
UPDATE unstuck_watch_periods SET until = ? WHERE id = (SELECT max(id) FROM unstuck_watch_periods);

-- name: begin_watch
INSERT INTO unstuck_watch_periods (since, until, cause, gap_s) VALUES (?, ?, ?, ?);

-- name: drop_old_periods
-- Those in which a living worker was silent count against it, so they stay.
DELETE FROM unstuck_watch_periods
WHERE id <= (SELECT max(id) FROM unstuck_watch_periods) - ?1
  AND (id <= (SELECT max(id) FROM unstuck_watch_periods) - ?2
       OR NOT EXISTS (SELECT 1 FROM unstuck_workers w JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
                      WHERE w.state IN ('active', 'draining', 'suspect') AND b.beat_at < unstuck_watch_periods.until));

-- name: set_back_periods
-- The clock was set back. All periods move with it, and so do all heartbeats of the living: if only those in the future
-- did, they would lie among older ones, and the same moments would count twice.
UPDATE unstuck_watch_periods SET since = since - ?1, until = until - ?1, set_back_at = set_back_at - ?1;

-- name: note_step_back
UPDATE unstuck_watch_periods SET set_back_s = ?1, set_back_at = ?2
WHERE id = (SELECT max(id) FROM unstuck_watch_periods);

-- name: set_back_beats
UPDATE unstuck_worker_heartbeats SET beat_at = min(beat_at - ?1, ?2)
WHERE beat_at > ?2 OR worker_id IN (SELECT id FROM unstuck_workers WHERE state IN ('active', 'draining', 'suspect'));

-- name: end_future_beats
UPDATE unstuck_worker_heartbeats SET beat_at = ?1 WHERE beat_at > ?1;

-- name: clear_suspicion
UPDATE unstuck_workers
SET state = iif(draining, 'draining', 'active'), suspect_boot_s = NULL, verdict = NULL
WHERE id = ? AND state = 'suspect';

-- name: set_metadata
UPDATE unstuck_workers SET metadata = ?2 WHERE id = ?1;

-- name: cancel_asked
SELECT id, token
FROM unstuck_jobs INDEXED BY unstuck_jobs_held
WHERE held = 1 AND worker_id = ? AND state = 'running' AND cancel_requested = 1;

-- name: drain
-- A suspect keeps its suspicion, and goes back to draining when it beats.
UPDATE unstuck_workers
SET draining = 1, state = iif(state = 'suspect', 'suspect', 'draining')
WHERE id = ? AND state IN ('active', 'suspect');

-- name: retire
UPDATE unstuck_workers
SET state = 'stopped', stopped_at = ?2, suspect_boot_s = NULL
WHERE id = ?1 AND state IN ('active', 'draining', 'suspect');

-- name: watch
-- Everyone who lives, and the dead as long as they hold anything. Of one host only those who have a process there: a
-- worker that comes over a network may name any host as its own.
SELECT
    w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.status_page, w.state,
    w.heartbeat_interval_s, b.beat_at, w.suspect_after_s, w.suspect_boot_s,
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    (
        SELECT max(iif(j.heartbeat, coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), 9e999))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    ),
    (
        SELECT min(coalesce(j.heartbeat_timeout_s, w.running_stale_after_s))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running' AND j.heartbeat = 1
    ),
    w.transport, json_extract(w.verdict, '$.detector'), w.recovery
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
WHERE (?1 IS NULL OR w.host = ?1 AND w.transport = 'python')
    AND (
        w.state IN ('active', 'draining', 'suspect')
        OR EXISTS (SELECT 1 FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id)
    )
ORDER BY w.id;

-- name: to_judge
-- The same, without the foreign workers that were heard within every timeout that concerns them: by far the most, and
-- there is nothing to judge of them.
SELECT
    w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.status_page, w.state,
    w.heartbeat_interval_s, b.beat_at, w.suspect_after_s, w.suspect_boot_s,
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    (
        SELECT max(iif(j.heartbeat, coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), 9e999))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    ),
    (
        SELECT min(coalesce(j.heartbeat_timeout_s, w.running_stale_after_s))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running' AND j.heartbeat = 1
    ),
    w.transport, json_extract(w.verdict, '$.detector'), w.recovery
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
WHERE (
        w.state IN ('active', 'draining', 'suspect')
        OR EXISTS (SELECT 1 FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id)
    )
    AND NOT (
        w.transport <> 'python'
        AND w.state IN ('active', 'draining')
        AND ?1 - b.beat_at < w.suspect_after_s
        AND NOT EXISTS (
            SELECT 1
            FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
            WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running' AND j.heartbeat = 1
                AND coalesce(j.heartbeat_timeout_s, w.running_stale_after_s) <= ?1 - b.beat_at
        )
    )
ORDER BY w.id;

-- name: count_living
SELECT count(*) FROM unstuck_workers WHERE state IN ('active', 'draining', 'suspect');

-- name: recovery_rules
SELECT DISTINCT recovery FROM unstuck_workers WHERE transport = 'python' AND recovery IS NOT NULL;

-- name: ring_of
SELECT
    w.id, w.name, w.host, w.pid, w.boot_id, w.pid_namespace, w.process_started, w.status_page, w.state,
    w.heartbeat_interval_s, b.beat_at, w.suspect_after_s, w.suspect_boot_s,
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    (
        SELECT max(iif(j.heartbeat, coalesce(j.heartbeat_timeout_s, w.running_stale_after_s), 9e999))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    ),
    (
        SELECT min(coalesce(j.heartbeat_timeout_s, w.running_stale_after_s))
        FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running' AND j.heartbeat = 1
    ),
    w.transport, json_extract(w.verdict, '$.detector'), w.recovery
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
WHERE w.host = ?2 AND w.transport = 'python' AND w.id <> ?1 AND w.state IN ('active', 'draining', 'suspect')
ORDER BY w.id < ?1, w.id
LIMIT ?3;

-- name: worker_evidence
SELECT w.state, b.beat_at
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
WHERE w.id = ?;

-- name: suspect_worker
UPDATE unstuck_workers
SET state = 'suspect', verdict = ?2, suspect_boot_s = ?3
WHERE id = ?1 AND state IN ('active', 'draining');

-- name: bury_worker
-- Under the write lock: every turn reads this state under the same lock, so none of a dead worker commits after it.
UPDATE unstuck_workers
SET state = 'dead', verdict = ?2, stopped_at = ?3
WHERE id = ?1 AND state IN ('active', 'draining', 'suspect');

-- name: amend
-- The dead do not change: whoever knows more of how one ended may add to it at any time.
UPDATE unstuck_workers SET verdict = ?2 WHERE id = ?1 AND state = 'dead';

-- name: request
UPDATE unstuck_workers SET request = ?2 WHERE id = ?1 AND state IN ('active', 'draining', 'suspect');

-- name: workers
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
    w.running_stale_after_s, w.recovery,
    (
        SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    )
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE ?1 = 0 OR w.state IN ('active', 'draining', 'suspect')
ORDER BY w.created_at, w.id;

-- name: insert_event
INSERT INTO unstuck_events (at, kind, job_id, worker_id, about, message) VALUES (?, ?, ?, ?, ?, ?);

-- Workers that come through another door than Python's own.

-- name: foreign_worker
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
    w.running_stale_after_s, w.recovery,
    (
        SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    )
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ? AND w.transport <> 'python';

-- name: fates
-- The row of a job tells of its last attempt, the others are kept apart. Joined by keys alone.
WITH asked AS (
    SELECT key AS place, json_extract(value, '$[0]') AS job_id, json_extract(value, '$[1]') AS token FROM json_each(?)
)
SELECT
    u.job_id, u.token, j.state, j.token, j.worker_id, w.name, coalesce(j.attempt, 0), j.started_at, j.finished_at,
    j.error_code,
    coalesce(a.worker_id, iif(j.token = u.token, j.worker_id, NULL)),
    coalesce(a.state, iif(j.token = u.token AND j.finished_at IS NOT NULL, coalesce(j.last_attempt_state, j.state), NULL)),
    coalesce(a.code, iif(j.token = u.token AND j.finished_at IS NOT NULL, j.error_code, NULL))
FROM asked u
LEFT JOIN unstuck_jobs j ON j.id = u.job_id
LEFT JOIN unstuck_attempts a ON a.job_id = u.job_id AND a.token = u.token
LEFT JOIN unstuck_workers w ON w.id = j.worker_id AND w.transport <> 'python'
ORDER BY u.place;

-- name: foreign_worker_named
-- At most one of a name lives; of the dead the last one tells what it was.
SELECT
    w.id, w.name, w.host, w.pid, w.state, w.queues, w.tasks, w.concurrency, w.created_at,
    coalesce(b.beat_at, w.created_at), w.stopped_at, coalesce(b.running, 0), coalesce(b.processed, 0),
    (SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held WHERE j.held = 1 AND j.worker_id = w.id),
    w.version, w.metadata, w.verdict, w.request, w.heartbeat_interval_s, w.suspect_after_s, w.disabled, h.disabled, w.transport, w.owner,
    w.running_stale_after_s, w.recovery,
    (
        SELECT count(*) FROM unstuck_jobs j INDEXED BY unstuck_jobs_held
        WHERE j.held = 1 AND j.worker_id = w.id AND j.state = 'running'
    )
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.name = ? AND w.transport <> 'python'
ORDER BY w.state IN ('active', 'draining', 'suspect') DESC, w.created_at DESC
LIMIT 1;

-- name: living_python_worker
SELECT id FROM unstuck_workers
WHERE name = ? AND transport = 'python' AND state IN ('active', 'draining', 'suspect')
LIMIT 1;

-- name: living_foreign_worker
SELECT id FROM unstuck_workers
WHERE name = ? AND transport <> 'python' AND state IN ('active', 'draining', 'suspect')
LIMIT 1;

-- name: is_registered
SELECT 1 FROM unstuck_workers WHERE id = ?;

-- name: foreign_pulse
SELECT w.state, w.draining, w.request, w.boot_id, w.disabled IS NOT NULL OR h.disabled IS NOT NULL
FROM unstuck_workers w
JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.id = ? AND w.transport <> 'python';

-- name: beat_foreign
-- One narrow row, updated in place. Never an insert: a worker whose row is gone is dead.
UPDATE unstuck_worker_heartbeats
SET beat_at = max(?2, coalesce((SELECT until FROM unstuck_watch_periods ORDER BY id DESC LIMIT 1), ?2)),
    running = coalesce(?3, running), processed = processed + ?4
WHERE worker_id = ?1;

-- name: move_to_this_boot
-- It outlived a restart of this machine, and is heard in another boot now.
UPDATE unstuck_workers SET boot_id = ?2 WHERE id = ?1;

-- name: restart_deadlines
-- What it runs has run since by the clock on the wall; the boot clock began anew.
UPDATE unstuck_jobs SET started_boot_s = ?2 - (?3 - started_at)
WHERE held = 1 AND worker_id = ?1 AND started_at IS NOT NULL;

-- name: listeners
SELECT address FROM unstuck_listeners;

-- name: add_listener
INSERT INTO unstuck_listeners (address) VALUES (?) ON CONFLICT DO NOTHING;

-- name: remove_listener
DELETE FROM unstuck_listeners WHERE address = ?;

-- Who is switched off, and by what health is judged.

-- name: disabled_host
SELECT 1 FROM unstuck_hosts WHERE name = ?;

-- name: standings
SELECT
    w.id, w.name, w.host, w.state, w.queues, w.tasks, w.metadata, w.disabled, h.disabled,
    w.request IS NOT NULL OR w.draining, w.suspect_after_s, b.beat_at, w.transport, w.recovery
FROM unstuck_workers w
LEFT JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id
LEFT JOIN unstuck_hosts h ON h.name = w.host
WHERE w.state IN ('active', 'draining', 'suspect')
ORDER BY w.id;

-- name: unserved_without
-- The queues that no other worker would serve. Read under the write lock: if two sessions disable two workers at once,
-- the second one sees what the first one did.
SELECT q.value
FROM unstuck_workers w, json_each(w.queues) q
WHERE w.id = ?1 AND w.state IN ('active', 'draining', 'suspect')
    AND NOT EXISTS (
        SELECT 1
        FROM unstuck_workers o
        JOIN unstuck_worker_heartbeats b ON b.worker_id = o.id
        LEFT JOIN unstuck_hosts h ON h.name = o.host
        WHERE o.id <> w.id
            AND o.state = 'active' AND o.request IS NULL AND o.disabled IS NULL AND h.disabled IS NULL
            AND b.beat_at > ?2 - o.suspect_after_s
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
INSERT INTO unstuck_hosts (name, disabled) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING;

-- name: enable_host
DELETE FROM unstuck_hosts WHERE name = ?;

-- name: forget_health_of_host
UPDATE unstuck_workers SET metadata = json_remove(metadata, '$.health')
WHERE host = ? AND state IN ('active', 'draining', 'suspect');

-- Where the answers to jobs go.

-- name: store_letter
-- A client that came back under the same key gets the answer, and not who it was before. A job that was removed since
-- its key was remembered has no letter.
INSERT INTO unstuck_reply_addresses (job_id, client, service, request_id, place, places, correlation, own_id, notify)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
WHERE EXISTS (SELECT 1 FROM unstuck_jobs WHERE id = ?1)
ON CONFLICT (job_id) DO UPDATE
SET client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
    places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
    answered_at = NULL;

-- name: answer_letters
UPDATE unstuck_reply_addresses SET answered_at = ?2
WHERE job_id IN (SELECT value FROM json_each(?1)) AND answered_at IS NULL;

-- name: letters
SELECT client, service, request_id, place, places, correlation, own_id, notify, job_id, answered_at
FROM unstuck_reply_addresses INDEXED BY unstuck_reply_addresses_unanswered
WHERE client = ?1 AND answered_at IS NULL AND job_id > ?2
ORDER BY job_id
LIMIT ?3;

-- name: letter
SELECT client, service, request_id, place, places, correlation, own_id, notify, job_id, answered_at
FROM unstuck_reply_addresses
WHERE job_id = ?;
