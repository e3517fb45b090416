-- What jobs wrote down on their way, and the signals that were sent to them.

-- name: may_write_entry
SELECT journal FROM unstuck_jobs WHERE id = ?1 AND token = ?2 AND worker_id = ?3 AND state = 'running';

-- name: write_entry
-- What is there already is not written again: an uncertain turn is repeated as it was. But what it waited for takes the
-- place of the waiting.
INSERT INTO unstuck_journal (job_id, seq, kind, name, value, at, token) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (job_id, seq) DO UPDATE
SET kind = excluded.kind, value = excluded.value, at = excluded.at, token = excluded.token
WHERE kind = 'wait' AND excluded.kind IN ('signal', 'timeout');

-- name: write_checkpoint
INSERT INTO unstuck_journal (job_id, seq, kind, name, value, at, token) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (job_id, seq) DO UPDATE SET value = excluded.value, at = excluded.at, token = excluded.token;

-- name: take_signal
UPDATE unstuck_signals SET taken_seq = ?3 WHERE job_id = ?1 AND number = ?2 AND taken_seq IS NULL;

-- name: mark_journal
UPDATE unstuck_jobs SET journal = 1 WHERE id = ? AND journal = 0;

-- name: journal_lines
SELECT job_id, seq, kind, name, value, ?2 - at
FROM unstuck_journal WHERE job_id IN (SELECT value FROM json_each(?1)) ORDER BY job_id, seq;

-- name: kept_signals
SELECT job_id, number, name, value
FROM unstuck_signals WHERE taken_seq IS NULL AND job_id IN (SELECT value FROM json_each(?1)) ORDER BY job_id, number;

-- name: has_signal
SELECT 1 FROM unstuck_signals WHERE job_id = ?1 AND name = ?2 AND taken_seq IS NULL LIMIT 1;

-- name: job_to_signal
SELECT state, awaits, queue, line, place FROM unstuck_jobs WHERE id = ?;

-- name: count_signals
SELECT count(*) FILTER (WHERE taken_seq IS NULL), coalesce(max(number), 0) FROM unstuck_signals WHERE job_id = ?;

-- name: keep_signal
INSERT INTO unstuck_signals (job_id, number, name, value, at, sent_by) VALUES (?1, ?2, ?3, ?4, ?5, ?6);

-- name: wake_job
UPDATE unstuck_jobs
SET state = 'pending', ready = line IS NULL, blocked = line IS NOT NULL, waiting = 0, awaits = NULL, run_at = ?2
WHERE id = ?1 AND state = 'waiting';

-- name: journal
SELECT seq, kind, name, value, at, token FROM unstuck_journal WHERE job_id = ? ORDER BY seq;

-- name: signals
SELECT number, name, value, at, sent_by, taken_seq FROM unstuck_signals WHERE job_id = ? ORDER BY number;
