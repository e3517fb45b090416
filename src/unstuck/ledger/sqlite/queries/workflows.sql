-- Workflows. Every write is made under the one write lock, so what was read a moment ago still stands.

-- name: insert_workflow
INSERT INTO unstuck_workflows (id, name, created_at) VALUES (?1, ?2, ?3);

-- name: stand_for_workflow
-- The job that stands for a workflow waits for it, and for nothing else.
UPDATE unstuck_jobs
SET state = 'waiting', ready = 0, blocked = 0, scheduled = 0, awaits_signal = 'workflow', has_links = 1, workflow_id = id, place = 0
WHERE id = ?1;

-- name: insert_node
INSERT INTO unstuck_workflow_nodes (workflow_id, place, parent, name, kind, state, on_error, blockers, open, source)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10);

-- name: insert_draft
INSERT INTO unstuck_node_jobs (
    workflow_id, place, rank, queue, task, delay_s, on_crash, heartbeat, heartbeat_timeout_s, timeout_s, enqueued_by,
    payload_type, concurrency_key, concurrency_limit, needs_inputs, hooks, expires_in_s, retain_s, policy, payload
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: enqueue_drafts
-- As `insert_tied_job` does it, without what no node has: a unique key, and a time of its own. Of a list of places, whose
-- drafts have the same or, being members, that of their map.
INSERT INTO unstuck_jobs (
    id, state, ready, scheduled, held, rank, queue, task, run_at, on_crash, heartbeat, heartbeat_timeout_s, timeout_s,
    enqueued_at, enqueued_by, payload_type, policy, payload, has_links, concurrency_key, workflow_id, place, hooks, expires_at, retain_s,
    concurrency_limit, needs_inputs, blocked
)
SELECT
    ?4 + i.key, 'pending', d.delay_s = 0 AND d.concurrency_key IS NULL, d.delay_s > 0, 0, d.rank, d.queue, d.task, ?5 + d.delay_s,
    d.on_crash, d.heartbeat, d.heartbeat_timeout_s, d.timeout_s, ?5, d.enqueued_by, d.payload_type, d.policy, d.payload,
    1, d.concurrency_key, ?1, i.value, d.hooks, ?5 + d.delay_s + d.expires_in_s, d.retain_s, d.concurrency_limit, d.needs_inputs,
    d.delay_s = 0 AND d.concurrency_key IS NOT NULL
FROM json_each(?2) i
CROSS JOIN unstuck_node_jobs d ON d.workflow_id = ?1 AND d.place = coalesce(?3, i.value);

-- name: where_drafts_go
-- In the order of the last that says so: its word on a line wins.
SELECT d.queue, d.concurrency_key, d.concurrency_limit
FROM json_each(?2) i
CROSS JOIN unstuck_node_jobs d ON d.workflow_id = ?1 AND d.place = i.value
GROUP BY d.queue, d.concurrency_key, d.concurrency_limit
ORDER BY max(i.key);

-- name: insert_member
INSERT INTO unstuck_workflow_nodes (
    workflow_id, place, parent, name, kind, state, on_error, blockers, open, item, item_value, item_of
)
VALUES (?1, ?2, ?3, ?4, 'task', 'waiting', ?5, 0, 0, ?6, ?7, ?8);

-- name: insert_edge
INSERT INTO unstuck_workflow_edges (workflow_id, source, target, data) VALUES (?1, ?2, ?3, ?4);

-- name: copy_edges
-- Members need what their map was given beside its list.
INSERT INTO unstuck_workflow_edges (workflow_id, source, target, data)
SELECT workflow_id, source, ?3, 1 FROM unstuck_workflow_edges WHERE workflow_id = ?1 AND target = ?2 AND data = 1 AND source <> ?4;

-- name: concerned_nodes
-- Nodes that wait for jobs which are over.
SELECT
    n.workflow_id, n.place, n.parent, n.name, n.on_error, j.state, j.id, j.error_code, j.error_message, j.error_cause,
    j.finished_at, j.result IS NULL
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
JOIN unstuck_workflow_nodes n ON n.workflow_id = j.workflow_id AND n.place = j.place
WHERE j.finished_at IS NOT NULL AND j.place > 0 AND n.state = 'released' AND n.job_id = j.id
ORDER BY n.workflow_id, n.place;

-- name: cancelled_roots
SELECT w.id
FROM json_each(?) i
CROSS JOIN unstuck_workflows w ON w.id = i.value
JOIN unstuck_jobs j ON j.id = w.id
WHERE w.finished_at IS NULL AND j.finished_at IS NOT NULL;

-- name: end_node
UPDATE unstuck_workflow_nodes SET state = ?3, finished_at = ?4, error = ?5 WHERE workflow_id = ?1 AND place = ?2;

-- name: node
SELECT place, parent, name, kind, state, on_error, blockers, open, source, job_id, error
FROM unstuck_workflow_nodes
WHERE workflow_id = ?1 AND place = ?2;

-- name: nodes_inside
SELECT place, parent, name, kind, state, on_error, blockers, open, source, job_id, error
FROM unstuck_workflow_nodes INDEXED BY unstuck_workflow_nodes_inside
WHERE workflow_id = ?1 AND parent = ?2
ORDER BY coalesce(item, 0), place;

-- name: nodes_at
SELECT n.place, n.parent, n.name, n.kind, n.state, n.on_error, n.blockers, n.open, n.source, n.job_id, n.error
FROM json_each(?2) i
CROSS JOIN unstuck_workflow_nodes n ON n.workflow_id = ?1 AND n.place = i.value
ORDER BY n.place;

-- name: freed_by
-- Who waits for these, and for how many others beside them.
SELECT n.place, n.blockers - freed.n, n.state, n.kind
FROM (
    SELECT e.target, count(*) AS n
    FROM json_each(?2) i
    CROSS JOIN unstuck_workflow_edges e ON e.workflow_id = ?1 AND e.source = i.value
    GROUP BY e.target
) AS freed
CROSS JOIN unstuck_workflow_nodes n ON n.workflow_id = ?1 AND n.place = freed.target;

-- name: wait_for_fewer
UPDATE unstuck_workflow_nodes SET blockers = ?3 WHERE workflow_id = ?1 AND place = ?2;

-- name: leave_scope
UPDATE unstuck_workflow_nodes SET open = open - ?3 WHERE workflow_id = ?1 AND place = ?2 RETURNING open, state;

-- name: open_map
UPDATE unstuck_workflow_nodes SET state = 'released', open = ?3 WHERE workflow_id = ?1 AND place = ?2;

-- name: release_node
UPDATE unstuck_workflow_nodes SET state = 'released', blockers = 0, job_id = ?3 WHERE workflow_id = ?1 AND place = ?2;

-- name: last_place
SELECT max(place) FROM unstuck_workflow_nodes WHERE workflow_id = ?;

-- name: stop_job_of_workflow
UPDATE unstuck_jobs
SET state = 'cancelled', ready = 0, scheduled = 0, blocked = 0, awaits_signal = NULL, held = 0, token = NULL, worker_id = NULL,
    claimed_at = NULL, finished_at = ?2, active_key = NULL, error_code = 'CANCELLED', error_message = 'Job was cancelled',
    error_cause = ?3, error_details = NULL
WHERE id = ?1 AND state IN ('pending', 'claimed', 'waiting');

-- name: ask_nodes_to_stop
UPDATE unstuck_jobs SET cancel_requested = 1, unstopped = NULL
WHERE held = 1 AND id IN (
    SELECT job_id FROM unstuck_workflow_nodes WHERE workflow_id = ?1 AND state = 'released' AND kind = 'task'
);

-- name: unstop_nodes
-- Take back that what still runs was asked to stop. Should it stop all the same, it is tried again.
UPDATE unstuck_jobs SET cancel_requested = 0, unstopped = 1
WHERE held = 1 AND cancel_requested = 1 AND id IN (
    SELECT job_id FROM unstuck_workflow_nodes WHERE workflow_id = ?1 AND state = 'released' AND kind = 'task'
);

-- name: end_workflow
UPDATE unstuck_workflows SET state = ?2, finished_at = ?3 WHERE id = ?1;

-- name: end_root
UPDATE unstuck_jobs
SET state = ?2, scheduled = 0, awaits_signal = NULL, finished_at = ?3, result = ?4, active_key = NULL, error_code = ?5,
    error_message = ?6, error_cause = ?7, error_details = ?8
WHERE id = ?1 AND finished_at IS NULL
RETURNING hooks;

-- name: pause_workflow
UPDATE unstuck_workflows SET state = 'paused' WHERE id = ?1 AND state = 'running';

-- name: go_on_if_nothing_is_paused
UPDATE unstuck_workflows SET state = 'running'
WHERE id = ?1 AND state = 'paused'
    AND NOT EXISTS (SELECT 1 FROM unstuck_workflow_nodes n WHERE n.workflow_id = ?1 AND n.state = 'paused');

-- name: go_on_workflow
UPDATE unstuck_workflows SET state = 'running', finished_at = NULL WHERE id = ?1;

-- name: owner_of_roots_key
SELECT o.id
FROM unstuck_jobs r
JOIN unstuck_jobs o ON o.active_key = r.unique_key AND o.id <> r.id
WHERE r.id = ?;

-- name: reopen_root
UPDATE unstuck_jobs
SET state = 'waiting', ready = 0, blocked = 0, scheduled = 0, awaits_signal = 'workflow', finished_at = NULL, result = NULL,
    error_code = NULL, error_message = NULL, error_cause = NULL, error_details = NULL, cancel_requested = 0,
    active_key = unique_key
WHERE id = ?1;

-- name: reopen_node
UPDATE unstuck_workflow_nodes SET state = ?3, job_id = ?4, finished_at = NULL, error = NULL WHERE workflow_id = ?1 AND place = ?2;

-- name: recount_nodes
UPDATE unstuck_workflow_nodes
SET blockers = (
        SELECT count(*)
        FROM unstuck_workflow_edges e
        JOIN unstuck_workflow_nodes s ON s.workflow_id = e.workflow_id AND s.place = e.source
        WHERE e.workflow_id = ?1 AND e.target = unstuck_workflow_nodes.place
            AND NOT (s.state = 'succeeded' OR s.state IN ('failed', 'cancelled') AND s.on_error = 'continue')
    ),
    open = (
        SELECT count(*)
        FROM unstuck_workflow_nodes m INDEXED BY unstuck_workflow_nodes_inside
        WHERE m.workflow_id = ?1 AND m.parent = unstuck_workflow_nodes.place
            AND NOT (m.state = 'succeeded' OR m.state IN ('failed', 'cancelled') AND m.on_error = 'continue')
    )
WHERE workflow_id = ?1;

-- name: nodes_due
SELECT n.place, n.kind
FROM unstuck_workflow_nodes n
JOIN unstuck_workflow_nodes p ON p.workflow_id = n.workflow_id AND p.place = n.parent
WHERE n.workflow_id = ?1 AND n.state = 'waiting' AND n.blockers = 0 AND p.state = 'released'
ORDER BY n.place;

-- name: scopes_over
SELECT place FROM unstuck_workflow_nodes
WHERE workflow_id = ?1 AND kind <> 'task' AND state = 'released' AND open = 0;

-- name: paused_nodes
SELECT place FROM unstuck_workflow_nodes WHERE workflow_id = ?1 AND state = 'paused';

-- name: go_past_node
UPDATE unstuck_workflow_nodes SET state = 'failed', on_error = 'continue' WHERE workflow_id = ?1 AND place = ?2;

-- name: job_place
SELECT workflow_id, place FROM unstuck_jobs WHERE id = ?;

-- name: workflow
SELECT id, name, state, created_at, finished_at FROM unstuck_workflows WHERE id = ?;

-- name: workflow_nodes
SELECT
    n.place, n.parent, n.name, n.kind, n.state, n.on_error, n.job_id, j.state,
    d.task, j.started_at, n.finished_at, n.error, n.item, n.blockers
FROM unstuck_workflow_nodes n
LEFT JOIN unstuck_jobs j ON j.id = n.job_id
LEFT JOIN unstuck_node_jobs d ON d.workflow_id = n.workflow_id AND d.place = iif(n.item IS NULL, n.place, n.parent)
WHERE n.workflow_id = ?1 AND n.place > 0
ORDER BY n.place;

-- name: workflow_edges
SELECT target, source FROM unstuck_workflow_edges WHERE workflow_id = ?1 ORDER BY target, source;

-- name: workflows
SELECT id, name, state, created_at, finished_at
FROM unstuck_workflows
WHERE id < ?1
ORDER BY id DESC
LIMIT ?2;

-- name: workflows_in_state
SELECT id, name, state, created_at, finished_at
FROM unstuck_workflows INDEXED BY unstuck_workflows_by_state
WHERE state = ?3 AND id < ?1
ORDER BY id DESC
LIMIT ?2;

-- name: count_nodes
SELECT state, count(*) FROM unstuck_workflow_nodes WHERE workflow_id = ?1 AND kind = 'task' GROUP BY state;

-- name: open_workflows
-- With how many nodes each has about.
SELECT w.id, (SELECT max(n.place) FROM unstuck_workflow_nodes n WHERE n.workflow_id = w.id)
FROM unstuck_workflows w INDEXED BY unstuck_workflows_open
WHERE w.finished_at IS NULL AND w.id > ?1
ORDER BY w.id;

-- name: nodes_of_the_gone
-- Nodes that wait for jobs which are over, or not there any more.
SELECT n.workflow_id, n.place, n.name, n.job_id, j.id, j.state
FROM json_each(?1) i
CROSS JOIN unstuck_workflow_nodes n ON n.workflow_id = i.value
LEFT JOIN unstuck_jobs j ON j.id = n.job_id
WHERE n.state = 'released' AND n.kind = 'task' AND (j.id IS NULL OR j.finished_at IS NOT NULL)
ORDER BY n.workflow_id, n.place
LIMIT ?2;

-- name: workflows_at_rest
-- They go on, and nothing in them does.
SELECT w.id
FROM json_each(?1) i
CROSS JOIN unstuck_workflows w ON w.id = i.value
WHERE w.finished_at IS NULL AND w.state = 'running'
    AND NOT EXISTS (
        SELECT 1 FROM unstuck_workflow_nodes n WHERE n.workflow_id = w.id AND n.state = 'released' AND n.kind = 'task'
    )
ORDER BY w.id
LIMIT ?2;

-- name: jobs_that_need_others
SELECT j.id
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
WHERE j.needs_inputs = 1;

-- name: inputs_of
SELECT e.source FROM unstuck_workflow_edges e WHERE e.workflow_id = ?1 AND e.target = ?2 AND e.data = 1 ORDER BY e.source;

-- name: item_of
SELECT item, item_value, item_of FROM unstuck_workflow_nodes WHERE workflow_id = ?1 AND place = ?2;

-- name: result_of_job
SELECT result FROM unstuck_jobs WHERE id = ?;

-- name: forget_workflows
DELETE FROM unstuck_workflows WHERE id IN (SELECT value FROM json_each(?));

-- name: jobs_of_open_workflows
SELECT j.id
FROM json_each(?) i
CROSS JOIN unstuck_jobs j ON j.id = i.value
JOIN unstuck_workflows w ON w.id = j.workflow_id
WHERE w.finished_at IS NULL;
