-- The guard against starvation.

-- Lift to the front of their queues a few of the jobs that waited longer than `p_waited_s` behind more urgent ones. The
-- walk goes from queue to queue and from rank to rank in the index. So few wait there at a time that urgent work
-- stands behind a handful and not behind a crowd.
create or replace function {schema}.lift_starving_v1(p_waited_s double precision, p_front integer, p_at_once integer)
returns table (queue text, count bigint)
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_queue text := '';
    v_rank integer;
    v_left bigint;
    v_ids bigint[];
    v_before constant timestamptz := now() - make_interval(secs => p_waited_s);
begin
    loop
        select j.queue into v_queue from {schema}.jobs j where j.ready and j.queue > v_queue order by j.queue limit 1;
        exit when v_queue is null;
        select p_at_once - count(*) into v_left from (
            select 1 from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank <= p_front
            order by j.rank, j.id limit p_at_once) x;
        -- The most urgent of the others have nobody before them.
        select j.rank into v_rank from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank > p_front
        order by j.rank limit 1;
        v_ids := '{}';
        while v_left > 0 and v_rank is not null loop
            select j.rank into v_rank from {schema}.jobs j where j.ready and j.queue = v_queue and j.rank > v_rank
            order by j.rank limit 1;
            exit when v_rank is null;
            select v_ids || array_agg(x.id) into v_ids from (
                select y.id from (
                    select j.id, coalesce(j.run_at, j.enqueued_at) as due_at from {schema}.jobs j
                    where j.ready and j.queue = v_queue and j.rank = v_rank
                    order by j.id limit 10 * p_at_once for update skip locked) y
                where y.due_at < v_before order by y.due_at limit v_left) x;
            v_left := p_at_once - coalesce(cardinality(v_ids), 0);
        end loop;
        continue when coalesce(cardinality(v_ids), 0) = 0;
        insert into {schema}.events (kind, job_id, message)
        select 'lifted', j.id, format('It waited behind more urgent jobs for %s s at priority %s, and went to the front of queue ''%s''',
                                      round(date_part('epoch', clock_timestamp() - coalesce(j.run_at, j.enqueued_at))), -j.rank, j.queue)
        from {schema}.jobs j where j.id = any (v_ids);
        update {schema}.jobs j set rank = p_front where j.id = any (v_ids);
        queue := v_queue;
        count := cardinality(v_ids);
        return next;
    end loop;
end
$body$;
