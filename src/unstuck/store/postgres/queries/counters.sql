-- What was counted, and the fleet in a few numbers.

-- name: count
select {schema}.count_v1(%(lately)s, %(names)s, %(labels)s, %(values)s);

-- name: counters
select name, labels, sum(value) from {schema}.counters where minute = 0 group by name, labels order by name, labels;

-- name: counter_series
select minute, name, labels, sum(value)
from {schema}.counters
where minute >= greatest(%(since)s::bigint, 1) and name = any (%(names)s)
group by minute, name, labels
order by minute, name, labels;

-- name: counter_sums
select name, labels, sum(value)
from {schema}.counters
where minute >= greatest(%(since)s::bigint, 1) and name = %(name)s
group by name, labels
order by labels;

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
