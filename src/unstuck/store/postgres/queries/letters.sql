-- Where the answers to jobs go, and what a broker's exchange needs beside turns.

-- name: post
-- Ids were drawn before, as for `enqueue`: repeated as it was, it stores nothing twice.
select place, job_id from {schema}.post_v1(
    %(ids)s, %(queues)s, %(tasks)s, %(payloads)s, %(payload_types)s, %(policies)s, %(on_crash)s, %(heartbeats)s,
    %(heartbeat_timeouts_s)s, %(timeouts_s)s, %(ranks)s, %(delays_s)s, %(runs_at)s, %(unique_keys)s, %(enqueued_by)s,
    %(more)s, %(clients)s, %(services)s, %(request_ids)s, %(letter_places)s, %(letters)s, %(correlations)s, %(own_ids)s,
    %(notifies)s);

-- name: store_letter
-- After an `enqueue_once` in the same transaction, for the job that its key stands for. The share lock keeps the job from
-- being removed meanwhile; one that was removed since its key was remembered has no letter.
insert into {schema}.letters as l (job_id, client, service, request_id, place, places, correlation, own_id, notify)
select j.id, %(client)s, %(service)s, %(request_id)s, %(place)s, %(places)s, %(correlation)s, %(own_id)s, %(notify)s
from {schema}.requests r
join {schema}.jobs j on j.id = r.job_ids[1]
where r.key = %(key)s and r.fingerprint = %(fingerprint)s
for key share of j
on conflict (job_id) do update set
    client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
    places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
    answered_at = null
returning l.job_id;

-- name: answer_letters
update {schema}.letters set answered_at = clock_timestamp()
where job_id = any (%(ids)s) and answered_at is null
returning job_id;

-- name: begin_exchange
select {schema}.begin_exchange_v1(%(worker_ids)s, %(ids)s);

-- name: end_exchange
select {schema}.end_exchange_v1();

-- name: beat_foreign_along
select n, state, was_suspect, request, cancel_ids, cancel_tokens, disabled
from {schema}.beat_foreign_along_v1(%(worker_ids)s, %(running)s, %(settled)s, %(metadata)s)
order by n;

-- name: letters
select client, service, request_id, place, places, correlation, own_id, notify, job_id,
       extract(epoch from answered_at)::double precision
from {schema}.letters
where client = %(client)s and answered_at is null and job_id > %(after)s
order by job_id
limit %(limit)s;

-- name: letter
select client, service, request_id, place, places, correlation, own_id, notify, job_id,
       extract(epoch from answered_at)::double precision
from {schema}.letters
where job_id = %(job_id)s;
