-- Enqueue work that follows the ends of other work.

-- Enqueue what these ends call for: once per attempt and hook, since the fence lets every attempt end once, and this is
-- its transaction. What fires is said in `domain/hooks.py`; the same here. Gives the queues in which there is work by it.
create or replace function {schema}.fire_hooks(p_ids bigint[], p_as text[]) returns text[]
language plpgsql volatile
{nested_loops}
as $body$
declare
    v_ids bigint[];
    v_queues text[];
    v_tasks text[];
    v_payloads bytea[];
    v_policies bytea[];
    v_on_crash text[];
    v_heartbeats boolean[];
    v_heartbeat_timeouts_s double precision[];
    v_timeouts_s double precision[];
    v_by text[];
    v_more jsonb[];
begin
    select array_agg(nextval('{schema}.job_ids'::regclass)), array_agg(f.spec ->> 'queue'), array_agg(f.spec ->> 'task'),
           array_agg(convert_to(jsonb_build_object('kwargs', jsonb_build_object('event', f.event))::text, 'UTF8')),
           array_agg(convert_to(f.spec ->> 'policy', 'UTF8')), array_agg(f.spec ->> 'on_crash'),
           array_agg((f.spec ->> 'heartbeat')::boolean), array_agg((f.spec ->> 'heartbeat_timeout_s')::double precision),
           array_agg((f.spec ->> 'timeout_s')::double precision), array_agg(f.by), array_agg(f.spec -> 'more')
    into v_ids, v_queues, v_tasks, v_payloads, v_policies, v_on_crash, v_heartbeats, v_heartbeat_timeouts_s, v_timeouts_s,
         v_by, v_more
    from (
        select h.spec, 'after_' || k.kind || ' of job ' || j.id as by,
               jsonb_build_object(
                   'kind', k.kind, 'job_id', j.id, 'task', j.task, 'queue', j.queue, 'state', j.state,
                   'attempt', j.attempt, 'code', j.error_code, 'message', j.error_message, 'cause', j.error_cause) as event
        from unnest(p_ids, p_as) with ordinality as u(id, ended, n)
        join {schema}.jobs j on j.id = u.id
        cross join lateral (values
            (1, 'success', u.ended = 'succeeded' and j.state = 'succeeded'),
            (2, 'failure', j.state in ('failed', 'quarantined')),
            (3, 'crash', u.ended = 'crashed'),
            (4, 'retry', j.state = 'pending' and u.ended in ('failed', 'crashed'))) as k(place, kind, fires)
        cross join lateral jsonb_array_elements(j.hooks -> k.kind) with ordinality as h(spec, m)
        where j.hooks is not null and k.fires
        order by u.n, k.place, h.m
    ) f;
    if v_ids is null then
        return '{}';
    end if;
    perform {schema}.enqueue_v1(
        v_ids, v_queues, v_tasks, v_payloads, null, v_policies, v_on_crash, v_heartbeats, v_heartbeat_timeouts_s,
        v_timeouts_s, null, null, null, null, v_by, v_more);
    return v_queues;
end
$body$;
