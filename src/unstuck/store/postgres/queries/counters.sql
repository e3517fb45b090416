-- What was counted, and the fleet in a few numbers.

-- name: count
-- In the order of the key, so that two who count the same never wait for each other crosswise. Each session adds to one
-- of four rows; nothing here is indexed but the key, so an update stays HOT.
with counted as (
    insert into {schema}.counters as c (minute, name, labels, slot, value)
    select u.lately * floor(extract(epoch from statement_timestamp()) / 60)::bigint, u.name, u.labels,
           pg_backend_pid() %% 4, u.value
    from unnest(%(lately)s::integer[], %(names)s::text[], %(labels)s::text[], %(values)s::double precision[])
        as u(lately, name, labels, value)
    order by 1, 2, 3
    on conflict (minute, name, labels, slot) do update set value = c.value + excluded.value
    returning 1
) select count(*) from counted;

-- name: counters
select name, labels, sum(value) from {schema}.counters where minute = 0 group by name, labels order by name, labels;

-- name: counter_series
select minute, name, labels, sum(value)
from {schema}.counters
where minute >= greatest(%(since)s::bigint, 1) and name = any (%(names)s)
group by minute, name, labels
order by minute, name, labels;

-- name: sweep_counters
with old as (
    select minute, name, labels, slot from {schema}.counters
    where minute > 0 and minute < floor(extract(epoch from statement_timestamp()) / 60)::bigint - %(kept)s
    order by minute limit %(limit)s
), gone as (
    delete from {schema}.counters c using old o
    where c.minute = o.minute and c.name = o.name and c.labels = o.labels and c.slot = o.slot
    returning 1
) select count(*) from gone;

-- name: fleet
select w.state, count(*), count(*) filter (where v.silent_s > 2 * w.heartbeat_interval_s), max(v.silent_s)
from {schema}.workers w
join {schema}.vitals v on v.worker_id = w.id
group by w.state;
