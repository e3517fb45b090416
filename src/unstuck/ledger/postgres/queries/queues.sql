-- Lines, limits of queues, expiry and what is kept for a time of its own; the work is in functions (0025).

-- name: lines
select l.key, l.places, l.pinned_by,
       (select count(*) from {schema}.jobs j where j.blocked and j.concurrency_key = l.key),
       array(select j.id from {schema}.jobs j where j.concurrency_key = l.key and (j.ready or j.held) order by j.id),
       array(select j.state from {schema}.jobs j where j.concurrency_key = l.key and (j.ready or j.held) order by j.id),
       array(select j.queue from {schema}.jobs j where j.concurrency_key = l.key and (j.ready or j.held) order by j.id)
from {schema}.concurrency_keys l
where %(key)s::text is null or l.key = %(key)s
order by l.key
limit %(limit)s;

-- name: limit_line
select unnest({schema}.set_places_v1(%(key)s, %(places)s, %(by)s));

-- name: tend_lines
select next_after, repaired, removed, queues from {schema}.check_keys_v1(%(after)s, %(limit)s);

-- name: queue_limits
select k.name, k.concurrency, k.rate, k.rate_window_s, k.limited_by,
       (select count(*) from {schema}.jobs j where j.held and j.queue = k.name), r.room, r.in_s
from {schema}.queues k
cross join lateral {schema}.room_of_v1(k.name) r
where k.concurrency is not null or k.rate is not null or k.limited_by is not null
order by k.name;

-- name: declare_limit
-- What an operator chose stands.
insert into {schema}.queues as k (name, concurrency, rate, rate_window_s)
select u.name, u.concurrency, u.rate, u.rate_window_s
from jsonb_to_recordset(%(limits)s::jsonb)
     as u(name text, concurrency integer, rate double precision, rate_window_s double precision)
order by u.name
on conflict (name) do update set
    concurrency = excluded.concurrency, rate = excluded.rate, rate_window_s = excluded.rate_window_s, tokens = null
where k.limited_by is null
  and (k.concurrency, k.rate, k.rate_window_s) is distinct from (excluded.concurrency, excluded.rate, excluded.rate_window_s)
returning k.name;

-- name: limit_queue
with chosen as (
    insert into {schema}.queues as k (name, concurrency, rate, rate_window_s, limited_by)
    values (%(queue)s, %(concurrency)s, %(rate)s, %(window_s)s, %(by)s)
    on conflict (name) do update set
        concurrency = excluded.concurrency, rate = excluded.rate, rate_window_s = excluded.rate_window_s,
        limited_by = excluded.limited_by, tokens = null
)
insert into {schema}.events (kind, message) values ('queue_limited', %(message)s) returning id;

-- name: ties
select concurrency_key, concurrency_limit, coalesce(blocked, false), extract(epoch from expires_at)::double precision, retain_s, unique_for,
       workflow_id, place, awaits_signal
from {schema}.jobs
where id = %(job_id)s;

-- name: expire_due
select expired, queues, next_in_s from {schema}.expire_due_v1(%(limit)s);

-- name: sweep_kept
select jobs, keys from {schema}.sweep_kept_v1(%(limit)s);
