-- Enqueue the jobs of nodes whose time has come.

-- `p_freed` of those that these nodes wait for have ended (NULL: they wait for none any more). Enqueue the jobs of
-- nodes whose time has come by that, and open maps whose list is known. Gives the queues, and the maps that ended at
-- once: those of an empty list, and those without one.
--
-- Plans of this function and those below are made when these tables are empty, and kept for as long as a session lasts. A
-- high price for every row that is read keeps them to the keys that were asked for, however few rows there were then.
create or replace function {schema}.release(
    p_workflows bigint[], p_places integer[], p_freed integer[],
    out queues text[], out ended_workflows bigint[], out ended_places integer[])
language plpgsql volatile
{loops_as_written}
set enable_memoize = off
as $body$
#variable_conflict use_column
declare
    c_items constant integer := 10000;
    v_workflows bigint[] := p_workflows;
    v_places integer[] := p_places;
    v_freed integer[] := p_freed;
    v_opens bigint[];
    v_maps integer[];
    v_map record;
    v_source record;
    v_values bytea[];
    v_members integer[];
    v_count integer;
    v_first integer;
    v_trouble text;
    v_keyed jsonb[];
    v_now constant timestamptz := clock_timestamp();
begin
    queues := '{}';
    ended_workflows := '{}';
    ended_places := '{}';
    while cardinality(v_workflows) > 0 loop
        -- Their jobs stand in the order of their places. One statement for all of it: each node is looked up once.
        with due as materialized (
            select d.workflow_id, d.place, d.freed, nextval('{schema}.job_ids'::regclass) as job_id
            from (
                select u.workflow_id, u.place, coalesce(u.freed, 0) as freed
                from unnest(v_workflows, v_places, v_freed) as u(workflow_id, place, freed)
                order by u.workflow_id, u.place
            ) d
        ), told as (
            update {schema}.workflow_nodes n set
                blockers = n.blockers - d.freed,
                state = case when n.kind = 'task' and n.state = 'waiting' and n.blockers = d.freed then 'released' else n.state end,
                job_id = case when n.kind = 'task' and n.state = 'waiting' and n.blockers = d.freed then d.job_id else n.job_id end
            from due d
            where n.workflow_id = d.workflow_id and n.place = d.place
            returning n.workflow_id, n.place, d.job_id, coalesce(n.job_id = d.job_id, false) as released,
                      case when n.item is null then n.place else n.parent end as draft,
                      n.kind = 'map' and n.state = 'waiting' and n.blockers = 0 as opens
        ), stored as (
            -- As `enqueue` does it, without what no node has: keys, and times of their own.
            insert into {schema}.jobs (
                id, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s, timeout_s, rank,
                enqueued_at, run_at, ready, scheduled, blocked, enqueued_by, has_links, concurrency_key, workflow_id, place, needs_inputs, hooks,
                expires_at, retain_s, concurrency_limit)
            select r.job_id, d.queue, d.task, d.payload, d.payload_type, d.policy, d.on_crash, d.heartbeat,
                   d.heartbeat_timeout_s, d.timeout_s, coalesce(d.rank, 0), v_now, v_now + make_interval(secs => d.delay_s),
                   coalesce(d.delay_s <= 0, true) and not coalesce(d.more ? 'concurrency_key', false), coalesce(d.delay_s > 0, false),
                   case when d.more ? 'concurrency_key' and coalesce(d.delay_s <= 0, true) then true end,
                   d.enqueued_by, true, d.more ->> 'concurrency_key', r.workflow_id, r.place, d.needs_inputs, d.more -> 'hooks',
                   v_now + make_interval(secs => coalesce(d.delay_s, 0) + (d.more ->> 'expires_in_s')::double precision),
                   (d.more ->> 'retain_s')::double precision, (d.more ->> 'concurrency_limit')::integer
            from told r join {schema}.node_jobs d on d.workflow_id = r.workflow_id and d.place = r.draft
            where r.released
            returning id, queue, concurrency_key, concurrency_limit
        )
        select queues || array(select s.queue from stored s group by s.queue),
               (select array_agg(jsonb_strip_nulls(jsonb_build_object('concurrency_key', s.concurrency_key, 'concurrency_limit', s.concurrency_limit)) order by s.id)
                from stored s where s.concurrency_key is not null),
               m.workflows, m.places
        into queues, v_keyed, v_opens, v_maps
        from (select array_agg(t.workflow_id) as workflows, array_agg(t.place) as places from told t where t.opens) m;
        if v_keyed is not null then
            perform {schema}.join_keys(v_keyed);
        end if;
        exit when v_opens is null;
        v_workflows := '{}';
        v_places := '{}';
        v_freed := null;
        for v_map in
            select n.* from unnest(v_opens, v_maps) as u(workflow_id, place)
            join {schema}.workflow_nodes n on n.workflow_id = u.workflow_id and n.place = u.place
        loop
            -- Whose list it is: a group's is that of the node that stands for it.
            with recursive way as (
                select s.place, s.kind, s.state, s.source, s.job_id, 1 as depth from {schema}.workflow_nodes s
                where s.workflow_id = v_map.workflow_id and s.place = v_map.source
                union all
                select s.place, s.kind, s.state, s.source, s.job_id, w.depth + 1
                from way w join {schema}.workflow_nodes s on s.workflow_id = v_map.workflow_id and s.place = w.source
                where w.kind = 'group' and w.state = 'succeeded'
            )
            select w.* into v_source from way w order by w.depth desc limit 1;
            v_values := null;
            v_members := null;
            v_trouble := null;
            v_count := 0;
            if v_source.kind = 'map' and v_source.state = 'succeeded' then
                select array_agg(m.place order by m.item), count(*) into v_members, v_count from {schema}.workflow_nodes m
                where m.workflow_id = v_map.workflow_id and m.parent = v_source.place;
            elsif v_source.kind = 'task' and v_source.state = 'succeeded' then
                begin
                    -- Counted first: a list of millions is not built to be refused.
                    select json_array_length(convert_from(j.result, 'UTF8')::json) into v_count
                    from {schema}.jobs j where j.id = v_source.job_id;
                    select array_agg(convert_to(e.value::text, 'UTF8') order by e.n) into v_values
                    from {schema}.jobs j
                    cross join lateral json_array_elements(convert_from(j.result, 'UTF8')::json) with ordinality as e(value, n)
                    where j.id = v_source.job_id and v_count <= c_items;
                exception when data_exception or feature_not_supported then
                    v_trouble := 'the result that it maps over is no list';
                end;
                if v_trouble is null and not exists (
                        select 1 from {schema}.jobs j where j.id = v_source.job_id and j.result is not null) then
                    v_trouble := 'the result that it maps over is not there any more';
                end if;
            else
                v_trouble := 'there is no result to map over: the node before it did not succeed';
            end if;
            if v_count > c_items then
                v_trouble := format('a map has at most %s items, and the list has %s', c_items, v_count);
            end if;
            if v_trouble is not null or v_count = 0 then
                update {schema}.workflow_nodes n set
                    state = case when v_trouble is null then 'succeeded' else 'failed' end, finished_at = clock_timestamp(),
                    error = case when v_trouble is not null then jsonb_build_object(
                        'node', n.name, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'The map could not begin', 'cause', v_trouble) end
                where n.workflow_id = v_map.workflow_id and n.place = v_map.place;
                ended_workflows := ended_workflows || v_map.workflow_id;
                ended_places := ended_places || v_map.place;
                continue;
            end if;
            select max(n.place) + 1 into v_first from {schema}.workflow_nodes n where n.workflow_id = v_map.workflow_id;
            insert into {schema}.workflow_nodes (
                workflow_id, place, parent, name, kind, state, on_error, blockers, open, item, item_value, item_of)
            select v_map.workflow_id, v_first + i, v_map.place, format('%s[%s]', v_map.name, i), 'task', 'waiting',
                   v_map.on_error, 0, 0, i, v_values[i + 1], v_members[i + 1]
            from generate_series(0, v_count - 1) as g(i);
            -- Members need what their map was given beside its list.
            insert into {schema}.workflow_edges (workflow_id, source, target, data)
            select e.workflow_id, e.source, v_first + g.i, true
            from {schema}.workflow_edges e cross join generate_series(0, v_count - 1) as g(i)
            where e.workflow_id = v_map.workflow_id and e.target = v_map.place and e.data and e.source <> v_map.source;
            update {schema}.workflow_nodes n set state = 'released', open = v_count
            where n.workflow_id = v_map.workflow_id and n.place = v_map.place;
            v_workflows := v_workflows || array_fill(v_map.workflow_id, array[v_count]);
            v_places := v_places || array(select v_first + g.i from generate_series(0, v_count - 1) as g(i));
        end loop;
    end loop;
end
$body$;
