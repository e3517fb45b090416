-- Make ready what is due.

-- Make ready what is due: scheduled jobs, retries, and those that slept long enough or waited too long for a signal. Who
-- stands in a line is let in by it, and so are jobs that could not be let in before (`admit_postponed`): their queues are given
-- with a count of 0. Rows that another session has locked just now are for the next round. now(), and not
-- clock_timestamp(): a bound that might move during the statement cannot end the walk along the index.
create or replace function {schema}.promote_due_v1(p_limit integer) returns table (queue text, count bigint)
language plpgsql volatile
{fixed_path}
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_queues text[];
    v_keys text[];
    v_woken text[] := '{}';
begin
    with due as materialized (
        select id from {schema}.jobs where scheduled and run_at <= now() order by run_at limit p_limit for update skip locked
    ), promoted as (
        update {schema}.jobs j set
            state = 'pending', ready = j.concurrency_key is null, blocked = case when j.concurrency_key is not null then true end,
            scheduled = false, awaits_signal = null
        from due where j.id = due.id
        returning j.queue, j.concurrency_key
    )
    select array_agg(queue), array_agg(distinct concurrency_key) filter (where concurrency_key is not null) into v_queues, v_keys from promoted;
    if v_keys is not null then
        v_woken := {schema}.admit(v_keys);
    end if;
    v_woken := v_woken || {schema}.admit_postponed(1000);
    return query
    select u.queue, sum(u.n)::bigint
    from (select q.queue, 1 as n from unnest(v_queues) as q(queue) union all select w.queue, 0 from unnest(v_woken) as w(queue)) u
    group by u.queue;
end
$body$;
