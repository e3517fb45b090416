-- Tokens of the web door.

-- name: add_api_token
insert into {schema}.api_tokens (id, name, hash, seal, scopes, created_by, expires_at)
values (%(id)s, %(name)s, %(hash)s, %(seal)s, %(scopes)s, %(created_by)s,
        clock_timestamp() + make_interval(secs => %(expires_in_s)s::double precision))
returning id;

-- name: api_tokens
-- Asked twice a second while anybody comes in: people make few tokens.
select id, name, hash, seal, scopes, extract(epoch from created_at)::double precision, created_by,
       extract(epoch from expires_at)::double precision, extract(epoch from revoked_at)::double precision,
       revoked_at is null and (expires_at is null or expires_at > clock_timestamp())
from {schema}.api_tokens
order by created_at, id;

-- name: revoke_api_token
update {schema}.api_tokens set revoked_at = clock_timestamp() where id = %(id)s and revoked_at is null returning id;

-- What operators did.

-- name: begin_audit
insert into {schema}.audit (by, transport, verb, target) values (%(by)s, %(door)s, %(verb)s, %(target)s) returning id;

-- name: end_audit
update {schema}.audit set outcome = %(outcome)s where id = %(id)s returning id;

-- name: audit
select a.id, extract(epoch from a.at)::double precision, a.by, a.transport, a.verb, a.target, a.outcome
from {schema}.audit a
where %(before_id)s::bigint is null or a.id < %(before_id)s
order by a.id desc
limit %(limit)s;

-- name: sweep_audit
-- Ids go with time: looking at the first few is enough.
with first as (
    select id, at from {schema}.audit order by id limit %(limit)s
), gone as (
    delete from {schema}.audit a using first f
    where a.id = f.id and f.at < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    returning 1
)
select count(*) from gone;

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
join {schema}.worker_watch v on v.worker_id = w.id
group by w.state;
