-- What jobs wrote down on their way, and the signals that were sent to them.

-- name: journal_lines
select job_id, seq, kind, name, value, extract(epoch from clock_timestamp() - at)::double precision
from {schema}.journal where job_id = any (%(ids)s) order by job_id, seq;

-- name: kept_signals
select job_id, number, name, value from {schema}.signals
where job_id = any (%(ids)s) and taken_seq is null order by job_id, number;

-- name: signal
select answer, queue from {schema}.signal_v1(%(job_id)s, %(name)s, %(value)s, %(by)s, %(limit)s);

-- name: journal
select seq, kind, name, value, extract(epoch from at)::double precision, token
from {schema}.journal where job_id = %(job_id)s order by seq;

-- name: signals
select number, name, value, extract(epoch from at)::double precision, sent_by, taken_seq
from {schema}.signals where job_id = %(job_id)s order by number;
