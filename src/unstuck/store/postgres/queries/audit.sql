-- What operators did.

-- name: begin_audit
insert into {schema}.audit (by, door, verb, target) values (%(by)s, %(door)s, %(verb)s, %(target)s) returning id;

-- name: end_audit
update {schema}.audit set outcome = %(outcome)s where id = %(id)s returning id;

-- name: audit
select a.id, extract(epoch from a.at)::double precision, a.by, a.door, a.verb, a.target, a.outcome
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
