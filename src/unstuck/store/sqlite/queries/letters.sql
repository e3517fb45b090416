-- Where the answers to jobs go.

-- name: store_letter
-- A client that came back under the same key gets the answer, and not who it was before. A job that was removed since
-- its key was remembered has no letter.
INSERT INTO unstuck_letters (job_id, client, service, request_id, place, places, correlation, own_id, notify)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
WHERE EXISTS (SELECT 1 FROM unstuck_jobs WHERE id = ?1)
ON CONFLICT (job_id) DO UPDATE
SET client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
    places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
    answered_at = NULL;

-- name: answer_letters
UPDATE unstuck_letters SET answered_at = ?2
WHERE job_id IN (SELECT value FROM json_each(?1)) AND answered_at IS NULL;

-- name: letters
SELECT client, service, request_id, place, places, correlation, own_id, notify, job_id, answered_at
FROM unstuck_letters INDEXED BY unstuck_letters_unanswered
WHERE client = ?1 AND answered_at IS NULL AND job_id > ?2
ORDER BY job_id
LIMIT ?3;

-- name: letter
SELECT client, service, request_id, place, places, correlation, own_id, notify, job_id, answered_at
FROM unstuck_letters
WHERE job_id = ?;
