-- Workflows: jobs that depend on each other. Settling a job, resolving its node, releasing those that waited for it and
-- finishing the workflow are one transaction, whoever settles.
--
-- A workflow is stood for by a job of its own (place 0), which waits, holds no slot, and ends with it: so whoever can wait
-- for a job, cancel it, or ask why, can do so with a workflow. Its id is that job's. Nodes have places from 1. A *group*
-- is a scope: it ends when all that is in it has ended, or when something in it failed that may not fail. Place 0 is the
-- outermost one. A *map* is a group whose members are made when its list is known.

create table {schema}.workflows (
    id          bigint primary key,
    name        text not null,
    state       text not null default 'running' check (state in ('running', 'paused', 'succeeded', 'failed', 'cancelled')),
    created_at  timestamptz not null,
    finished_at timestamptz,
    constraint ended_when_finished check ((finished_at is not null) = (state in ('succeeded', 'failed', 'cancelled')))
) with (fillfactor = 70);
create index workflows_open on {schema}.workflows (id) where finished_at is null;
create index workflows_by_state on {schema}.workflows (state, id);

-- No foreign keys from here on: these rows are written with their workflow by `begin_workflow` and removed with it by
-- `forget_workflows`, and to look for the workflow once more with every row was a third of the price of a start.
create table {schema}.nodes (
    workflow_id bigint not null,
    place       integer not null check (place >= 0),
    parent      integer,
    name        text not null,
    kind        text not null check (kind in ('task', 'map', 'group')),
    state       text not null check (state in ('waiting', 'released', 'paused', 'succeeded', 'failed', 'cancelled')),
    on_error    text not null check (on_error in ('fail', 'continue', 'pause')),
    -- How many of those that it waits for have not ended well enough.
    blockers    integer not null check (blockers >= 0),
    -- Of a scope: how many in it have not.
    open        integer not null check (open >= 0),
    -- Of a map, whose result is the list; of a group, whose result is its own.
    source      integer,
    -- Of a member of a map: which one it is, and its value, or the node whose result that is.
    item        integer,
    item_value  bytea,
    item_of     integer,
    job_id      bigint,
    finished_at timestamptz,
    error       jsonb,
    -- That its job was asked to stop was taken back while that was in somebody's hands: it is still to be told (`unstop`).
    unstop      boolean,
    primary key (workflow_id, place),
    constraint outermost check ((parent is null) = (place = 0)),
    constraint only_tasks_have_jobs check (kind = 'task' or job_id is null)
-- A node is written when it is released and when it ends. No index has a column that changes then, and there is room on
-- the page: both are HOT.
) with (fillfactor = 40);
-- The parent first: else a plan made for an empty table might look for a place by it, and read the whole workflow.
create index nodes_inside on {schema}.nodes (parent, workflow_id);

create table {schema}.edges (
    workflow_id bigint not null,
    source      integer not null,
    target      integer not null,
    -- The target gets the source's result; otherwise it only comes after it.
    data        boolean not null,
    primary key (workflow_id, source, target)
);
create index edges_into on {schema}.edges (workflow_id, target);

-- What the job of a node will be, or those of a map's members. Written once, beside the row that changes.
create table {schema}.drafts (
    workflow_id         bigint not null,
    place               integer not null,
    -- It gets results of others.
    needs               boolean,
    queue               text not null,
    task                text not null,
    payload             bytea not null,
    payload_type        text,
    policy              bytea,
    on_crash            text,
    heartbeat           boolean,
    heartbeat_timeout_s double precision,
    timeout_s           double precision,
    rank                integer,
    delay_s             double precision,
    enqueued_by         text,
    more                jsonb,
    primary key (workflow_id, place)
);

-- What a failed node is to those who depend on it.
create function {schema}.node_error(p_name text, p_job {schema}.jobs) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $body$
    select jsonb_build_object(
        'node', p_name, 'job_id', (p_job).id,
        'code', case when (p_job).id is null then 'RESULT_NOT_AVAILABLE'
                     when (p_job).error_code = 'CANCELLED' then 'TASK_CANCELLED'
                     else coalesce((p_job).error_code, 'RESULT_NOT_AVAILABLE') end,
        'message', coalesce((p_job).error_message, 'Its result is not there any more'),
        'cause', (p_job).error_cause)
$body$;

-- So many of those that these nodes wait for (`p_freed`; NULL: none any more) have ended. Enqueue the jobs of nodes whose time
-- has come by that, and open maps whose list is known. Gives the queues, and the maps that ended at once: those of an
-- empty list, and those without one.
--
-- Plans of this function and those below are made when these tables are empty, and kept for as long as a session lasts. A
-- high price for every row that is read keeps them to the keys that were asked for, however few rows there were then.
create function {schema}.release(
    p_workflows bigint[], p_places integer[], p_freed integer[],
    out queues text[], out ended_workflows bigint[], out ended_places integer[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_memoize = off
set jit = off
set random_page_cost = 1
set cpu_tuple_cost = 10
set join_collapse_limit = 1
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
    v_lined jsonb[];
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
            update {schema}.nodes n set
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
                enqueued_at, run_at, ready, waiting, blocked, enqueued_by, tied, line, workflow_id, place, needs, hooks,
                expires_at, keep_s, line_limit)
            select r.job_id, d.queue, d.task, d.payload, d.payload_type, d.policy, d.on_crash, d.heartbeat,
                   d.heartbeat_timeout_s, d.timeout_s, coalesce(d.rank, 0), v_now, v_now + make_interval(secs => d.delay_s),
                   coalesce(d.delay_s <= 0, true) and not coalesce(d.more ? 'line', false), coalesce(d.delay_s > 0, false),
                   case when d.more ? 'line' and coalesce(d.delay_s <= 0, true) then true end,
                   d.enqueued_by, true, d.more ->> 'line', r.workflow_id, r.place, d.needs, d.more -> 'hooks',
                   v_now + make_interval(secs => coalesce(d.delay_s, 0) + (d.more ->> 'expires_in_s')::double precision),
                   (d.more ->> 'keep_s')::double precision, (d.more ->> 'line_limit')::integer
            from told r join {schema}.drafts d on d.workflow_id = r.workflow_id and d.place = r.draft
            where r.released
            returning id, queue, line, line_limit
        )
        select queues || array(select s.queue from stored s group by s.queue),
               (select array_agg(jsonb_strip_nulls(jsonb_build_object('line', s.line, 'line_limit', s.line_limit)) order by s.id)
                from stored s where s.line is not null),
               m.workflows, m.places
        into queues, v_lined, v_opens, v_maps
        from (select array_agg(t.workflow_id) as workflows, array_agg(t.place) as places from told t where t.opens) m;
        if v_lined is not null then
            perform {schema}.line_up(v_lined);
        end if;
        exit when v_opens is null;
        v_workflows := '{}';
        v_places := '{}';
        v_freed := null;
        for v_map in
            select n.* from unnest(v_opens, v_maps) as u(workflow_id, place)
            join {schema}.nodes n on n.workflow_id = u.workflow_id and n.place = u.place
        loop
            -- Whose list it is: a group's is that of the node that stands for it.
            with recursive way as (
                select s.place, s.kind, s.state, s.source, s.job_id, 1 as depth from {schema}.nodes s
                where s.workflow_id = v_map.workflow_id and s.place = v_map.source
                union all
                select s.place, s.kind, s.state, s.source, s.job_id, w.depth + 1
                from way w join {schema}.nodes s on s.workflow_id = v_map.workflow_id and s.place = w.source
                where w.kind = 'group' and w.state = 'succeeded'
            )
            select w.* into v_source from way w order by w.depth desc limit 1;
            v_values := null;
            v_members := null;
            v_trouble := null;
            v_count := 0;
            if v_source.kind = 'map' and v_source.state = 'succeeded' then
                select array_agg(m.place order by m.item), count(*) into v_members, v_count from {schema}.nodes m
                where m.workflow_id = v_map.workflow_id and m.parent = v_source.place;
            elsif v_source.kind = 'task' and v_source.state = 'succeeded' then
                begin
                    select array_agg(convert_to(e.value::text, 'UTF8') order by e.n), count(*) into v_values, v_count
                    from {schema}.jobs j
                    cross join lateral json_array_elements(convert_from(j.result, 'UTF8')::json) with ordinality as e(value, n)
                    where j.id = v_source.job_id;
                exception when data_exception or feature_not_supported then
                    v_trouble := 'the result that it maps over is no list';
                end;
                if v_trouble is null and not exists (select 1 from {schema}.jobs j where j.id = v_source.job_id) then
                    v_trouble := 'the result that it maps over is not there any more';
                end if;
            else
                v_trouble := 'there is no result to map over: the node before it did not succeed';
            end if;
            if v_count > c_items then
                v_trouble := format('a map has at most %s items, and the list has %s', c_items, v_count);
            end if;
            if v_trouble is not null or v_count = 0 then
                update {schema}.nodes n set
                    state = case when v_trouble is null then 'succeeded' else 'failed' end, finished_at = clock_timestamp(),
                    error = case when v_trouble is not null then jsonb_build_object(
                        'node', n.name, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'The map could not begin', 'cause', v_trouble) end
                where n.workflow_id = v_map.workflow_id and n.place = v_map.place;
                ended_workflows := ended_workflows || v_map.workflow_id;
                ended_places := ended_places || v_map.place;
                continue;
            end if;
            select max(n.place) + 1 into v_first from {schema}.nodes n where n.workflow_id = v_map.workflow_id;
            insert into {schema}.nodes (
                workflow_id, place, parent, name, kind, state, on_error, blockers, open, item, item_value, item_of)
            select v_map.workflow_id, v_first + i, v_map.place, format('%s[%s]', v_map.name, i), 'task', 'waiting',
                   v_map.on_error, 0, 0, i, v_values[i + 1], v_members[i + 1]
            from generate_series(0, v_count - 1) as g(i);
            -- Members need what their map was given beside its list.
            insert into {schema}.edges (workflow_id, source, target, data)
            select e.workflow_id, e.source, v_first + g.i, true
            from {schema}.edges e cross join generate_series(0, v_count - 1) as g(i)
            where e.workflow_id = v_map.workflow_id and e.target = v_map.place and e.data and e.source <> v_map.source;
            update {schema}.nodes n set state = 'released', open = v_count
            where n.workflow_id = v_map.workflow_id and n.place = v_map.place;
            v_workflows := v_workflows || array_fill(v_map.workflow_id, array[v_count]);
            v_places := v_places || array(select v_first + g.i from generate_series(0, v_count - 1) as g(i));
        end loop;
    end loop;
end
$body$;

-- End a scope early: what is in it and was not begun is cancelled. What runs goes on, and its end changes nothing any more.
-- Gives the queues in which others may go on.
create function {schema}.close_scope(p_workflow bigint, p_scope integer, p_cause text) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_inside bigint[];
    v_jobs bigint[];
    v_now timestamptz := clock_timestamp();
begin
    with recursive inside as (
        select n.place, n.job_id from {schema}.nodes n where n.workflow_id = p_workflow and n.parent = p_scope
        union all
        select n.place, n.job_id from inside i
        join {schema}.nodes n on n.workflow_id = p_workflow and n.parent = i.place
    )
    select array_agg(i.place), array_agg(i.job_id) filter (where i.job_id is not null) into v_places, v_inside from inside i;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, blocked = null, awaits = null, finished_at = v_now,
            live_key = null, error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = p_cause,
            error_details = null
        where j.id = any (v_inside) and j.state in ('pending', 'waiting')
        returning j.id
    )
    select array_agg(s.id order by s.id) into v_jobs from stopped s;
    -- What was claimed and not begun is taken back: its worker finds out when it would start it. What is in somebody's hands
    -- at this moment is just beginning; and to wait for those, with others of that worker in hand, may be to wait for ever.
    with unbegun as materialized (
        select j.id from {schema}.jobs j where j.id = any (v_inside) and j.state = 'claimed' for update skip locked
    ), stopped as (
        update {schema}.jobs j set
            state = 'cancelled', held = false, token = null, worker_id = null, claimed_at = null, finished_at = v_now,
            live_key = null, error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = p_cause,
            error_details = null
        from unbegun u
        where j.id = u.id
        returning j.id
    )
    select v_jobs || array_agg(s.id order by s.id) into v_jobs from stopped s;
    insert into {schema}.events (at, kind, job_id, message)
    select v_now, 'cancelled', u.id, left('CANCELLED: ' || p_cause, 500) from unnest(v_jobs) as u(id);
    update {schema}.nodes n set
        state = 'cancelled', finished_at = v_now,
        error = jsonb_build_object('node', n.name, 'job_id', n.job_id, 'code', 'TASK_CANCELLED',
                                   'message', 'It was not begun', 'cause', p_cause)
    where n.workflow_id = p_workflow and n.place = any (v_places)
      and (n.state in ('waiting', 'paused') or n.state = 'released' and (n.kind <> 'task' or n.job_id = any (v_jobs)));
    -- What waited for an operator may have been in there.
    update {schema}.workflows w set state = 'running'
    where w.id = p_workflow and w.state = 'paused'
      and not exists (select 1 from {schema}.nodes n where n.workflow_id = p_workflow and n.state = 'paused');
    return case when v_jobs is null then '{}' else {schema}.leave_lines(v_jobs) end;
end
$body$;

-- The result of a node as JSON; errors stand for themselves, under a name that no result has by chance.
create function {schema}.node_result(p_workflow bigint, p_place integer) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_node {schema}.nodes;
    v_result bytea;
    v_there boolean;
begin
    select n.* into v_node from {schema}.nodes n where n.workflow_id = p_workflow and n.place = p_place;
    if v_node.state is distinct from 'succeeded' then
        return jsonb_build_object('$error', coalesce(v_node.error, jsonb_build_object(
            'node', v_node.name, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'It has not ended')))::text;
    end if;
    if v_node.kind = 'group' then
        return case when v_node.source is null then 'null' else {schema}.node_result(p_workflow, v_node.source) end;
    end if;
    if v_node.kind = 'map' then
        return '[' || coalesce((
            select string_agg({schema}.node_result(p_workflow, m.place), ',' order by m.item) from {schema}.nodes m
            where m.workflow_id = p_workflow and m.parent = p_place), '') || ']';
    end if;
    select j.result, true into v_result, v_there from {schema}.jobs j where j.id = v_node.job_id;
    if v_there is null then
        return jsonb_build_object('$error', {schema}.node_error(v_node.name, null))::text;
    end if;
    return coalesce(convert_from(v_result, 'UTF8'), 'null');
exception when data_exception then
    return jsonb_build_object('$error', jsonb_build_object(
        'node', v_node.name, 'job_id', v_node.job_id, 'code', 'RESULT_NOT_AVAILABLE', 'message', 'Its result is no JSON'))::text;
end
$body$;

-- Write the ends of whole workflows: of their rows, and of the jobs that stand for them. Gives the queues in which there is
-- work by it.
create function {schema}.finish_workflows(p_workflows bigint[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
#variable_conflict use_column
declare
    c_bytes constant integer := 67108864;
    v_now constant timestamptz := clock_timestamp();
    v_hooked bigint[];
    v_hooked_as text[];
begin
    with roots as materialized (
        select n.workflow_id as id, n.state, n.error,
               case when n.state = 'succeeded' then convert_to({schema}.node_result(n.workflow_id, 0), 'UTF8') end as result
        from unnest(p_workflows) as u(id)
        -- With a limit, or the planner might look for the place in all workflows that there are.
        cross join lateral (select m.* from {schema}.nodes m where m.workflow_id = u.id and m.place = 0 limit 1) n
    ), outcomes as materialized (
        select r.id, r.state, case when octet_length(r.result) <= c_bytes then r.result end as result,
               case when octet_length(r.result) > c_bytes then jsonb_build_object(
                        'code', 'RESULT_NOT_STORABLE', 'message', 'Result cannot be stored',
                        'cause', format('the results of the workflow together are over %s bytes', c_bytes))
                    else r.error end as error
        from roots r
    ), ends as materialized (
        select o.id, o.result, o.error,
               case when o.error is null then 'succeeded' when o.state = 'cancelled' then 'cancelled' else 'failed' end as state
        from outcomes o
    ), flows as (
        update {schema}.workflows w set state = e.state, finished_at = v_now from ends e where w.id = e.id
    ), stands as (
        update {schema}.jobs j set
            state = e.state, waiting = false, awaits = null, finished_at = v_now, result = e.result, live_key = null,
            error_code = case when e.state = 'cancelled' then 'CANCELLED' else e.error ->> 'code' end,
            error_message = e.error ->> 'message', error_cause = e.error ->> 'cause',
            error_details = case when e.error is not null then jsonb_build_object(
                'node', e.error ->> 'node', 'node_job_id', e.error -> 'job_id') end
        from ends e
        where j.id = e.id and coalesce(j.finished_at is null, false)
        returning j.id, j.state, j.hooks is not null as hooked
    ), told as (
        insert into {schema}.events (at, kind, job_id, message)
        select v_now, e.state, e.id,
               left(concat_ws(': ', e.error ->> 'code', 'node ' || (e.error ->> 'node'),
                              coalesce(e.error ->> 'cause', e.error ->> 'message')), 500)
        from ends e where e.error is not null
    )
    select array_agg(s.id order by s.id), array_agg(s.state order by s.id) into v_hooked, v_hooked_as
    from stands s where s.hooked;
    return case when v_hooked is null then '{}' else {schema}.fire_hooks(v_hooked, v_hooked_as) end;
end
$body$;

-- Plans: joins are done in the order in which they are written, from the few that are given along the keys: statistics of
-- tables that were empty a moment ago must not turn that round.
--
-- Move workflows on after these nodes ended, round by round: those that waited for them are released, scopes in which
-- nothing is left end, scopes that may not go on are closed. Whoever calls has locked the workflows, and gathers lines.
--
-- `p_parents` and `p_good` say of each what it is in and whether it ended well enough, where that is known already.
create function {schema}.move_on(
    p_workflows bigint[], p_places integer[], p_parents integer[] default null, p_good boolean[] default null) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set random_page_cost = 1
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
#variable_conflict use_column
declare
    v_workflows bigint[] := p_workflows;
    v_places integer[] := p_places;
    v_parents integer[] := p_parents;
    v_good boolean[] := p_good;
    v_closed_workflows bigint[];
    v_closed_places integer[];
    v_good_workflows bigint[];
    v_good_places integer[];
    v_good_parents integer[];
    v_bad_workflows bigint[];
    v_bad_places integer[];
    v_next_workflows bigint[];
    v_next_places integer[];
    v_freed_workflows bigint[];
    v_freed_places integer[];
    v_freed integer[];
    v_bad record;
    v_released record;
    v_woken text[] := '{}';
begin
    while cardinality(v_workflows) > 0 loop
        v_next_workflows := '{}';
        v_next_places := '{}';
        -- The outermost scope is over: so is its workflow.
        if 0 = any (v_places) then
            v_woken := v_woken || {schema}.finish_workflows(array(
                select u.workflow_id from unnest(v_workflows, v_places) as u(workflow_id, place) where u.place = 0));
        end if;
        if v_parents is null then
            select array_agg(n.workflow_id), array_agg(n.place), array_agg(n.parent),
                   array_agg(n.state = 'succeeded' or n.on_error = 'continue')
            into v_workflows, v_places, v_parents, v_good
            from unnest(v_workflows, v_places) as u(workflow_id, place)
            join {schema}.nodes n on n.workflow_id = u.workflow_id and n.place = u.place
            where n.parent is not null;
        end if;
        -- What is left counts only while the scope around it is open.
        select array_agg(p.workflow_id), array_agg(p.place) into v_closed_workflows, v_closed_places
        from (select u.workflow_id, u.place from unnest(v_workflows, v_parents) as u(workflow_id, place) group by 1, 2) s
        join {schema}.nodes p on p.workflow_id = s.workflow_id and p.place = s.place
        where coalesce(p.state <> 'released', false);
        v_good_workflows := v_workflows;
        v_good_places := v_places;
        v_good_parents := v_parents;
        v_bad_workflows := null;
        if v_closed_places is not null or false = any (v_good) then
            select array_agg(u.workflow_id) filter (where u.good), array_agg(u.place) filter (where u.good),
                   array_agg(u.parent) filter (where u.good),
                   array_agg(u.workflow_id) filter (where not u.good), array_agg(u.place) filter (where not u.good)
            into v_good_workflows, v_good_places, v_good_parents, v_bad_workflows, v_bad_places
            from unnest(v_workflows, v_places, v_parents, v_good) as u(workflow_id, place, parent, good)
            where v_closed_places is null
               or (u.workflow_id, u.parent) not in (
                   select c.workflow_id, c.place from unnest(v_closed_workflows, v_closed_places) as c(workflow_id, place));
        end if;
        if v_bad_workflows is not null then
            -- Sorted before the join: an order behind it makes the planner walk through all nodes that there are.
            for v_bad in
                select n.workflow_id, n.place, n.parent, n.name, n.on_error, n.error
                from (
                    select x.workflow_id, x.place from unnest(v_bad_workflows, v_bad_places) as x(workflow_id, place)
                    order by x.workflow_id, x.place
                ) u
                cross join lateral (
                    select m.* from {schema}.nodes m where m.workflow_id = u.workflow_id and m.place = u.place limit 1
                ) n
                where coalesce(n.state in ('failed', 'cancelled'), false)
            loop
                if v_bad.on_error = 'pause' then
                    update {schema}.nodes n set state = 'paused' where n.workflow_id = v_bad.workflow_id and n.place = v_bad.place;
                    update {schema}.workflows w set state = 'paused' where w.id = v_bad.workflow_id and w.state = 'running';
                    insert into {schema}.events (kind, job_id, message)
                    values ('workflow_paused', v_bad.workflow_id, left(format(
                        'Node %s failed (%s) and waits for an operator: %s', v_bad.name, v_bad.error ->> 'code',
                        coalesce(v_bad.error ->> 'cause', v_bad.error ->> 'message')), 500));
                    continue;
                end if;
                -- Of several that failed at once the first one decides.
                update {schema}.nodes n set state = 'failed', finished_at = clock_timestamp(), error = v_bad.error
                where n.workflow_id = v_bad.workflow_id and n.place = v_bad.parent and n.state = 'released';
                if found then
                    v_woken := v_woken || {schema}.close_scope(
                        v_bad.workflow_id, v_bad.parent, format('node %s failed before it', v_bad.name));
                    v_next_workflows := v_next_workflows || v_bad.workflow_id;
                    v_next_places := v_next_places || v_bad.parent;
                end if;
            end loop;
        end if;

        v_freed_workflows := null;
        if v_good_workflows is not null then
            select array_agg(f.workflow_id), array_agg(f.target), array_agg(f.n)
            into v_freed_workflows, v_freed_places, v_freed
            from (
                select e.workflow_id, e.target, count(*)::integer as n
                from unnest(v_good_workflows, v_good_places) as u(workflow_id, place)
                join {schema}.edges e on e.workflow_id = u.workflow_id and e.source = u.place
                group by e.workflow_id, e.target
            ) f;
            with left_open as (
                select u.workflow_id, u.parent, count(*) as n
                from unnest(v_good_workflows, v_good_parents) as u(workflow_id, parent)
                group by u.workflow_id, u.parent
            ), told as (
                update {schema}.nodes s set
                    open = s.open - l.n,
                    state = case when s.open = l.n and s.state = 'released' then 'succeeded' else s.state end,
                    finished_at = case when s.open = l.n and s.state = 'released' then clock_timestamp() else s.finished_at end
                from left_open l
                where s.workflow_id = l.workflow_id and s.place = l.parent
                returning s.workflow_id, s.place, s.open, s.state
            )
            select v_next_workflows || array_agg(t.workflow_id), v_next_places || array_agg(t.place)
            into v_next_workflows, v_next_places
            from told t where t.open = 0 and t.state = 'succeeded';
        end if;
        if v_freed_workflows is not null then
            select r.* into v_released from {schema}.release(v_freed_workflows, v_freed_places, v_freed) r;
            v_woken := v_woken || v_released.queues;
            v_next_workflows := v_next_workflows || v_released.ended_workflows;
            v_next_places := v_next_places || v_released.ended_places;
        end if;
        v_workflows := v_next_workflows;
        v_places := v_next_places;
        v_parents := null;
    end loop;
    return v_woken;
end
$body$;

-- Lock the workflows of these jobs, in their order: two who end nodes of one workflow come one after the other.
--
-- The order of locks is: workers, workflows, jobs, lines. Whoever ends a job, cancels it, gives it back or queues it again
-- calls this before it touches the job; for whoever moves a workflow on goes from its row to jobs of it. Who only claims
-- or starts jobs, or makes them ready, waits for no workflow afterwards and needs no lock on it.
create function {schema}.lock_workflows(p_ids bigint[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set cpu_tuple_cost = 10
as $body$
declare
    v_workflows bigint[];
begin
    select array_agg(distinct j.workflow_id) into v_workflows
    from unnest(p_ids) as u(id) join {schema}.jobs j on j.id = u.id
    where coalesce(j.workflow_id is not null, false);
    if v_workflows is not null then
        perform 1 from {schema}.workflows w where w.id = any (v_workflows) order by w.id for update;
    end if;
end
$body$;

-- Lock those of these workflows that nobody has in hand, and give them.
create function {schema}.free_workflows(p_workflows bigint[]) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
begin
    return array(select w.id from {schema}.workflows w where w.id = any (p_workflows) for update skip locked);
end
$body$;

-- These jobs are over, and so are their nodes, at these places; where the job of a workflow itself was cancelled, nothing of
-- it is begun any more. Whoever calls has locked the workflows, and gathers lines.
--
-- `p_succeeded_at` says that all of them succeeded, and when, where that is known: then their jobs are not read again.
create function {schema}.advance(
    p_ids bigint[], p_workflows bigint[], p_places integer[], p_succeeded_at timestamptz default null) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set random_page_cost = 1
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
#variable_conflict use_column
declare
    v_workflows bigint[];
    v_places integer[];
    v_parents integer[];
    v_good boolean[];
    v_woken text[] := '{}';
    v_root bigint;
begin
    -- The whole before its parts: who gave up both gave up the workflow, it did not fail.
    if 0 = any (p_places) then
        for v_root in
            select w.id from {schema}.workflows w join {schema}.jobs j on j.id = w.id
            where w.id = any (p_ids) and w.finished_at is null and j.finished_at is not null
            order by w.id
        loop
            v_woken := v_woken || {schema}.cancel_workflow(v_root);
        end loop;
    end if;
    if p_succeeded_at is not null then
        with ended as (
            update {schema}.nodes n set state = 'succeeded', finished_at = p_succeeded_at, error = null
            from unnest(p_ids, p_workflows, p_places) as u(id, workflow_id, place)
            where n.workflow_id = u.workflow_id and n.place = u.place
              and coalesce(u.place > 0 and n.state = 'released' and n.job_id = u.id, false)
            returning n.workflow_id, n.place, n.parent
        )
        select array_agg(e.workflow_id), array_agg(e.place), array_agg(e.parent) into v_workflows, v_places, v_parents
        from ended e;
        v_good := array_fill(true, array[coalesce(cardinality(v_workflows), 0)]);
    else
        with ended as (
            update {schema}.nodes n set
                state = case j.state when 'succeeded' then 'succeeded' when 'cancelled' then 'cancelled' else 'failed' end,
                finished_at = j.finished_at,
                error = case when j.state <> 'succeeded' then {schema}.node_error(n.name, j) end
            from unnest(p_ids, p_workflows, p_places) as u(id, workflow_id, place)
            join {schema}.jobs j on j.id = u.id
            where n.workflow_id = u.workflow_id and n.place = u.place
              and coalesce(u.place > 0 and j.finished_at is not null and n.state = 'released' and n.job_id = j.id, false)
            returning n.workflow_id, n.place, n.parent, n.state = 'succeeded' or n.on_error = 'continue' as good
        )
        select array_agg(e.workflow_id), array_agg(e.place), array_agg(e.parent), array_agg(e.good)
        into v_workflows, v_places, v_parents, v_good from ended e;
    end if;
    if v_workflows is not null then
        v_woken := v_woken || {schema}.move_on(v_workflows, v_places, v_parents, v_good);
    end if;
    return v_woken;
end
$body$;

-- The job that stands for a workflow was cancelled: so is what was not begun, and what runs is asked to stop. What
-- somebody has in hand just now may be ending, and then they wait for the workflow: who asked us asks those by themselves,
-- when it is done (see `nodes_to_stop`).
create function {schema}.cancel_workflow(p_workflow bigint) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_woken text[];
    v_workers text[];
begin
    v_woken := {schema}.close_scope(p_workflow, 0, format('workflow %s was cancelled', p_workflow));
    with free as materialized (
        select j.id from {schema}.nodes n join {schema}.jobs j on j.id = n.job_id
        where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.held
        for update of j skip locked
    ), asked as (
        update {schema}.jobs j set cancel_requested = true, unstopped = null from free f where j.id = f.id returning j.worker_id
    )
    select array_agg(a.worker_id) into v_workers from asked a;
    perform {schema}.flag_cancels(v_workers);
    update {schema}.nodes n set unstop = null where n.workflow_id = p_workflow and coalesce(n.unstop, false);
    update {schema}.nodes n set
        state = 'cancelled', finished_at = clock_timestamp(),
        error = jsonb_build_object('node', n.name, 'code', 'TASK_CANCELLED', 'message', 'Workflow was cancelled')
    where n.workflow_id = p_workflow and n.place = 0;
    update {schema}.workflows w set state = 'cancelled', finished_at = clock_timestamp() where w.id = p_workflow;
    return v_woken;
end
$body$;

-- Begin a workflow: the job that stands for it, its nodes, and the jobs of those that wait for nobody. Done again with the
-- same id it changes nothing. Gives the queues of what can begin; NULL where it was there already, or another one has its
-- unique key.
create function {schema}.begin_workflow_v1(p_id bigint, p_name text, p_root jsonb, p_nodes jsonb, p_edges jsonb) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
    v_places integer[];
    v_released record;
    v_woken text[];
    v_outer boolean;
begin
    insert into {schema}.jobs (
        id, queue, task, payload, rank, enqueued_at, run_at, state, ready, waiting, awaits, unique_key, live_key, enqueued_by,
        tied, workflow_id, place, hooks, keep_s)
    select p_id, r.queue, r.task, decode(r.payload, 'base64'), coalesce(r.rank, 0), v_now, v_now, 'waiting', false, false,
           'workflow', r.unique_key, r.unique_key, r.enqueued_by, true, p_id, 0, r.more -> 'hooks',
           (r.more ->> 'keep_s')::double precision
    from jsonb_to_record(p_root) as r(
        queue text, task text, payload text, rank integer, unique_key text, enqueued_by text, more jsonb)
    on conflict do nothing;
    if not found then
        return null;
    end if;
    insert into {schema}.workflows (id, name, created_at) values (p_id, p_name, v_now);
    insert into {schema}.nodes (
        workflow_id, place, parent, name, kind, state, on_error, blockers, open, source)
    select p_id, n.place, n.parent, n.name, n.kind, case when n.kind = 'group' then 'released' else 'waiting' end,
           n.on_error, n.blockers, n.open, n.source
    from jsonb_to_recordset(p_nodes) as n(
        place integer, parent integer, name text, kind text, on_error text, blockers integer, open integer, source integer);
    insert into {schema}.drafts (
        workflow_id, place, needs, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s,
        timeout_s, rank, delay_s, enqueued_by, more)
    select p_id, n.place, n.needs, s.queue, s.task, decode(s.payload, 'base64'), s.payload_type, decode(s.policy, 'base64'),
           s.on_crash, s.heartbeat, s.heartbeat_timeout_s, s.timeout_s, s.rank, s.delay_s, s.enqueued_by, s.more
    from jsonb_to_recordset(p_nodes) as n(place integer, needs boolean, spec jsonb)
    cross join lateral jsonb_to_record(n.spec) as s(
        queue text, task text, payload text, payload_type text, policy text, on_crash text, heartbeat boolean,
        heartbeat_timeout_s double precision, timeout_s double precision, rank integer, delay_s double precision,
        enqueued_by text, more jsonb)
    where n.spec is not null;
    insert into {schema}.edges (workflow_id, source, target, data)
    select p_id, (e.value ->> 0)::integer, (e.value ->> 1)::integer, (e.value ->> 2)::boolean
    from jsonb_array_elements(p_edges) as e(value);
    select array_agg(n.place order by n.place) into v_places from {schema}.nodes n
    where n.workflow_id = p_id and n.state = 'waiting' and n.blockers = 0;
    v_outer := {schema}.gather_lines();
    select r.* into v_released from {schema}.release(array_fill(p_id, array[cardinality(v_places)]), v_places, null) r;
    v_woken := v_released.queues;
    if cardinality(v_released.ended_places) > 0 then
        v_woken := v_woken || {schema}.move_on(v_released.ended_workflows, v_released.ended_places);
    end if;
    return v_woken || case when v_outer then {schema}.let_in_gathered() else '{}' end;
end
$body$;

-- The same once per request, however often it is sent (see `enqueue_once`).
create function {schema}.begin_workflow_once_v1(
    p_key bytea, p_fingerprint bytea, p_keep_s double precision, p_id bigint, p_unique_key text, p_name text, p_root jsonb,
    p_nodes jsonb, p_edges jsonb)
returns table (first boolean, fingerprint bytea, job_ids bigint[], fresh boolean[], queues text[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    c_rounds constant integer := 100;
    v_first constant boolean := {schema}.is_first(p_key, p_fingerprint, p_keep_s);
    v_queues text[];
    v_owner bigint;
begin
    if v_first then
        for i in 1 .. c_rounds loop
            v_queues := {schema}.begin_workflow_v1(p_id, p_name, p_root, p_nodes, p_edges);
            exit when v_queues is not null;
            -- Another one has its key, unless that ended in between.
            select j.id into v_owner from {schema}.jobs j where j.live_key = p_unique_key;
            exit when found;
            if i = c_rounds then
                raise exception 'a unique key changed hands % times during one request', c_rounds using errcode = '40001';
            end if;
        end loop;
        update {schema}.requests r set job_ids = array[coalesce(v_owner, p_id)], fresh = array[v_owner is null]
        where r.key = p_key;
    end if;
    return query
    select v_first, r.fingerprint, r.job_ids, r.fresh, v_queues from {schema}.requests r where r.key = p_key;
end
$body$;

-- Count anew what each node and scope of a workflow waits for, from what is known of its nodes, and go on from there. For
-- operators who retry or resume, and for what should be impossible. Whoever calls gathers lines.
create function {schema}.recount(p_workflow bigint) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_released record;
    v_woken text[] := '{}';
    v_ended integer[];
begin
    update {schema}.nodes n set
        blockers = (
            select count(*) from {schema}.edges e
            join {schema}.nodes s on s.workflow_id = e.workflow_id and s.place = e.source
            where e.workflow_id = p_workflow and e.target = n.place
              and not (s.state = 'succeeded' or s.state in ('failed', 'cancelled') and s.on_error = 'continue')),
        open = (
            select count(*) from {schema}.nodes m where m.workflow_id = p_workflow and m.parent = n.place
              and not (m.state = 'succeeded' or m.state in ('failed', 'cancelled') and m.on_error = 'continue'))
    where n.workflow_id = p_workflow;
    select array_agg(n.place order by n.place) into v_places from {schema}.nodes n
    join {schema}.nodes p on p.workflow_id = n.workflow_id and p.place = n.parent
    where n.workflow_id = p_workflow and n.state = 'waiting' and n.blockers = 0 and p.state = 'released';
    if v_places is not null then
        select r.* into v_released from {schema}.release(array_fill(p_workflow, array[cardinality(v_places)]), v_places, null) r;
        v_woken := v_released.queues;
        if cardinality(v_released.ended_places) > 0 then
            v_woken := v_woken || {schema}.move_on(v_released.ended_workflows, v_released.ended_places);
        end if;
    end if;
    -- Scopes in which nothing is left, from the inside out: the ends of the inner ones are in `open` of the outer already.
    with done as (
        update {schema}.nodes n set state = 'succeeded', finished_at = clock_timestamp()
        where n.workflow_id = p_workflow and n.kind <> 'task' and n.state = 'released' and n.open = 0
        returning n.place
    ) select array_agg(d.place) into v_ended from done d;
    if v_ended is not null then
        v_woken := v_woken || {schema}.move_on(array_fill(p_workflow, array[cardinality(v_ended)]), v_ended);
    end if;
    return v_woken;
end
$body$;

-- Take back that this job was asked to stop, where `reopen_workflow` could not. Whoever asked anew since then took the mark
-- away, under the same lock on the workflow, and was later: that stands.
create function {schema}.unstop_v1(p_id bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set lock_timeout = '500ms'
as $body$
begin
    perform {schema}.lock_workflows(array[p_id]);
    update {schema}.nodes n set unstop = null from {schema}.jobs j
    where j.id = p_id and n.workflow_id = j.workflow_id and n.place = j.place
      and coalesce(n.unstop and n.job_id = p_id, false);
    if found then
        update {schema}.jobs j set cancel_requested = null, unstopped = true
        where j.id = p_id and coalesce(j.held and j.cancel_requested, false);
    end if;
end
$body$;

-- Open a workflow that has ended again, or that is paused: what failed is tried again, what was cancelled may begin.
create function {schema}.reopen_workflow_v1(p_workflow bigint, p_by text) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_scopes integer[] := array[0];
    v_jobs bigint[] := '{}';
    v_more bigint[];
    v_there bigint[];
    v_outer boolean;
    v_woken text[];
begin
    update {schema}.workflows w set state = 'running', finished_at = null
    where w.id = p_workflow and w.state in ('failed', 'cancelled', 'paused');
    if not found then
        return null;
    end if;
    begin
        update {schema}.jobs j set
            state = 'waiting', ready = false, blocked = null, waiting = false, awaits = 'workflow', finished_at = null,
            result = null, error_code = null, error_message = null, error_cause = null, error_details = null,
            cancel_requested = null, live_key = j.unique_key
        where j.id = p_workflow;
    exception when unique_violation then
        -- While it was over another was started with its unique key.
        perform {schema}.refuse_duplicate(o.id)
        from {schema}.jobs r join {schema}.jobs o on o.live_key = r.unique_key and o.id <> r.id
        where r.id = p_workflow;
        raise exception 'the unique key of workflow % changed hands just now', p_workflow using errcode = '40001';
    end;
    v_outer := {schema}.gather_lines();
    update {schema}.nodes n set state = 'released', finished_at = null, error = null
    where n.workflow_id = p_workflow and n.place = 0;
    -- From the outside in: what is inside a scope that failed and may have failed is left as it is. What runs still,
    -- though its scope was closed, ends as it will.
    while v_scopes is not null loop
        with again as (
            select n.place, n.kind, j.id as job_id,
                   exists (select 1 from {schema}.nodes m where m.workflow_id = p_workflow and m.parent = n.place) as has_members
            from {schema}.nodes n
            left join {schema}.jobs j on j.id = n.job_id and j.state in ('failed', 'cancelled', 'quarantined')
            where n.workflow_id = p_workflow and n.parent = any (v_scopes)
              and (n.state in ('cancelled', 'paused') or n.state = 'failed' and n.on_error <> 'continue')
        ), opened as (
            update {schema}.nodes n set
                state = case when a.job_id is not null or n.kind = 'group' or a.has_members then 'released' else 'waiting' end,
                job_id = a.job_id, finished_at = null, error = null
            from again a
            where n.workflow_id = p_workflow and n.place = a.place
            returning n.place, n.kind, n.state, n.job_id
        )
        select array_agg(o.job_id) filter (where o.job_id is not null) into v_more from opened o;
        v_jobs := v_jobs || v_more;
        select array_agg(n.place) into v_scopes from {schema}.nodes n
        where n.workflow_id = p_workflow and n.parent = any (v_scopes) and n.kind <> 'task' and n.state = 'released';
    end loop;
    -- Removed just now, since its workflow was over: its node gets another.
    v_there := array(
        select j.id from {schema}.jobs j where j.id = any (v_jobs) and j.finished_at is not null order by j.id for update);
    if cardinality(v_there) < cardinality(v_jobs) then
        update {schema}.nodes n set state = 'waiting', job_id = null
        where n.workflow_id = p_workflow and n.state = 'released' and n.job_id = any (v_jobs) and n.job_id <> all (v_there);
    end if;
    perform {schema}.requeue(v_there, p_by);
    perform {schema}.admit(array(select distinct j.line from {schema}.jobs j where j.id = any (v_there) and j.line is not null));
    -- What runs still was asked to stop, where the workflow was cancelled. That is taken back: should it stop all the same,
    -- since its worker had heard of it, it is tried again. What is in somebody's hands just now is marked, and told by
    -- whoever asked us, each alone: who waits for one while holding another might wait for ever.
    v_more := array(
        select j.id from {schema}.nodes n join {schema}.jobs j on j.id = n.job_id
        where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.held and j.cancel_requested
        for update of j skip locked);
    update {schema}.jobs j set cancel_requested = null, unstopped = true where j.id = any (v_more);
    update {schema}.nodes n set unstop = true from {schema}.jobs j
    where n.workflow_id = p_workflow and n.state = 'released' and n.kind = 'task' and j.id = n.job_id
      and coalesce(j.held and j.cancel_requested, false);
    insert into {schema}.events (kind, job_id, message)
    values ('retried', p_workflow, format('Workflow was taken up again by %s', p_by));
    v_woken := {schema}.recount(p_workflow);
    return v_woken || case when v_outer then {schema}.let_in_gathered() else '{}' end;
end
$body$;

-- Go on past what is paused: those who depend on it get its error.
create function {schema}.resume_workflow_v1(p_workflow bigint, p_by text) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_places integer[];
    v_woken text[];
    v_outer constant boolean := {schema}.gather_lines();
begin
    perform 1 from {schema}.workflows w where w.id = p_workflow and w.state = 'paused' for update;
    if not found then
        return null;
    end if;
    with gone_on as (
        update {schema}.nodes n set state = 'failed', on_error = 'continue'
        where n.workflow_id = p_workflow and n.state = 'paused'
        returning n.place
    ) select array_agg(g.place) into v_places from gone_on g;
    update {schema}.workflows w set state = 'running' where w.id = p_workflow;
    insert into {schema}.events (kind, job_id, message)
    values ('workflow_resumed', p_workflow, format('Resumed by %s, past what failed', p_by));
    v_woken := {schema}.move_on(array_fill(p_workflow, array[cardinality(v_places)]), v_places);
    return v_woken || case when v_outer then {schema}.let_in_gathered() else '{}' end;
end
$body$;

-- A job was queued again by an operator: its node waits for it again, and so does a workflow that ended with it. Its own
-- job, queued again, means the whole workflow.
create function {schema}.reopen(p_id bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
#variable_conflict use_column
declare
    v_workflow bigint;
    v_place integer;
begin
    select j.workflow_id, j.place into v_workflow, v_place from {schema}.jobs j where j.id = p_id;
    if v_workflow is null then
        return;
    end if;
    perform 1 from {schema}.workflows w where w.id = v_workflow for update;
    if not found then
        return;
    end if;
    if v_place = 0 then
        perform {schema}.reopen_workflow_v1(v_workflow, 'an operator');
        return;
    end if;
    update {schema}.nodes n set state = 'released', finished_at = null, error = null
    where n.workflow_id = v_workflow and n.place = v_place and n.job_id = p_id
      and n.state in ('failed', 'cancelled', 'paused') and n.on_error <> 'continue';
    if found then
        if exists (select 1 from {schema}.workflows w where w.id = v_workflow and w.state in ('failed', 'cancelled')) then
            perform {schema}.reopen_workflow_v1(v_workflow, 'an operator');
        elsif not exists (select 1 from {schema}.nodes n where n.workflow_id = v_workflow and n.state = 'paused') then
            update {schema}.workflows w set state = 'running' where w.id = v_workflow and w.state = 'paused';
        end if;
    end if;
end
$body$;

-- Find what should be impossible (rows edited by hand, restored from a backup), repair it by the same ways, and say so.
--
-- Looked at are the workflows behind `p_after` that go on, as many as have so many nodes together, in the order of ids: a
-- stretch at a time, so that a round costs the same however much there is. Gives the workflows, what was wrong, and the
-- queues in which jobs became ready; in a last row, without a workflow, where to go on (NULL: it was the end).
create function {schema}.repair_workflows_v1(p_after bigint, p_look integer, p_limit integer)
returns table (workflow_id bigint, what text, queues text[], next_after bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set random_page_cost = 1
set cpu_tuple_cost = 10
set join_collapse_limit = 1
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_found record;
    v_ids bigint[] := '{}';
    v_left integer := p_look;
    v_end bigint;
    v_outer constant boolean := {schema}.gather_lines();
begin
    for v_found in
        select w.id, (select max(n.place) from {schema}.nodes n where n.workflow_id = w.id) as nodes
        from {schema}.workflows w where w.finished_at is null and w.id > p_after order by w.id
    loop
        v_ids := v_ids || v_found.id;
        v_left := v_left - coalesce(v_found.nodes, 0) - 1;
        if v_left <= 0 then
            v_end := v_found.id;
            exit;
        end if;
    end loop;
    -- Jobs that are over, or gone, while their nodes wait for them.
    for v_found in
        select n.workflow_id, n.place, n.name, n.job_id, j.id as there, j.state
        from unnest(v_ids) with ordinality as u(id, n)
        join {schema}.nodes n on n.workflow_id = u.id
        left join {schema}.jobs j on j.id = n.job_id
        where coalesce(n.state = 'released' and n.kind = 'task', false) and (j.id is null or j.finished_at is not null)
        order by u.n, n.place
        limit p_limit
    loop
        workflow_id := v_found.workflow_id;
        -- Not waited for: what was repaired before it is in our hands.
        perform 1 from {schema}.workflows w where w.id = v_found.workflow_id for update skip locked;
        continue when not found;
        if v_found.there is not null then
            what := format('node %s waited for job %s, which is %s', v_found.name, v_found.job_id, v_found.state);
            queues := {schema}.advance(array[v_found.job_id], array[v_found.workflow_id], array[v_found.place]);
        else
            what := format('node %s waited for job %s, which is not there any more', v_found.name, v_found.job_id);
            update {schema}.nodes n set state = 'failed', finished_at = clock_timestamp(), error = {schema}.node_error(n.name, null)
            where n.workflow_id = v_found.workflow_id and n.place = v_found.place and n.state = 'released'
              and n.job_id is not distinct from v_found.job_id;
            continue when not found;
            queues := {schema}.move_on(array[v_found.workflow_id], array[v_found.place]);
        end if;
        return next;
    end loop;
    -- Workflows that go on in which nothing does.
    for v_found in
        select w.id from {schema}.workflows w
        where w.id = any (v_ids) and w.state = 'running'
          and not exists (select 1 from {schema}.nodes n
                          where n.workflow_id = w.id and coalesce(n.state = 'released' and n.kind = 'task', false))
        order by w.id
        limit p_limit
        for update skip locked
    loop
        workflow_id := v_found.id;
        what := 'nothing of it went on';
        queues := {schema}.recount(v_found.id);
        return next;
    end loop;
    workflow_id := null;
    what := null;
    queues := case when v_outer then {schema}.let_in_gathered() else '{}' end;
    next_after := v_end;
    return next;
end
$body$;

-- Of jobs that are nodes: how those ended that they need. One row for each, in order; a map has one for each member, with
-- its number (`item`), or one row without a number where it has none.
create function {schema}.inputs_v1(p_ids bigint[])
returns table (
    job_id bigint, place integer, is_list boolean, item integer, result bytea, error jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set join_collapse_limit = 1
as $body$
    with recursive wanted as (
        select j.id as job_id, j.workflow_id, e.source as place, e.source as at
        from {schema}.jobs j
        join {schema}.edges e on e.workflow_id = j.workflow_id and e.target = j.place and e.data
        where j.id = any (p_ids)
        union all
        -- A group's result is that of the node that stands for it.
        select w.job_id, w.workflow_id, w.place, n.source
        from wanted w
        join {schema}.nodes n on n.workflow_id = w.workflow_id and n.place = w.at
        where n.kind = 'group' and n.state = 'succeeded' and n.source is not null
    ), found as (
        select w.job_id, w.workflow_id, w.place, n.kind = 'map' and n.state = 'succeeded' as is_list, n.place as at, n.kind, n.state, n.name, n.job_id as node_job, n.error
        from wanted w
        join {schema}.nodes n on n.workflow_id = w.workflow_id and n.place = w.at
        where not (n.kind = 'group' and n.state = 'succeeded' and n.source is not null)
    ), parts as (
        select f.job_id, f.place, f.is_list, null::integer as item, f.kind, f.state, f.name, f.node_job, f.error from found f where not f.is_list
        union all
        select f.job_id, f.place, true, m.item, coalesce(m.kind, 'none'), m.state, m.name, m.job_id, m.error
        from found f
        left join {schema}.nodes m on m.workflow_id = f.workflow_id and m.parent = f.at
        where f.is_list
    )
    select p.job_id, p.place, p.is_list, p.item, case when p.state = 'succeeded' then d.result end,
           case when p.kind = 'task' and (p.state <> 'succeeded' or d.id is null)
                    then coalesce(p.error, {schema}.node_error(p.name, null))
                when p.kind in ('map', 'group') and p.state <> 'succeeded' then p.error end
    from parts p
    left join {schema}.jobs d on d.id = p.node_job
    union all
    -- Of members of maps: their own item, as place -1.
    select j.id, -1, false, n.item,
           coalesce(n.item_value, case when s.state = 'succeeded' then d.result end),
           case when n.item_value is null and (s.state <> 'succeeded' or d.id is null)
                    then coalesce(s.error, {schema}.node_error(s.name, null)) end
    from {schema}.jobs j
    join {schema}.nodes n on n.workflow_id = j.workflow_id and n.place = j.place
    left join {schema}.nodes s on s.workflow_id = n.workflow_id and s.place = n.item_of
    left join {schema}.jobs d on d.id = s.job_id
    where j.id = any (p_ids) and n.item is not null
    order by 1, 2, 4
$body$;

-- Remove what is kept of workflows whose own jobs are removed.
create function {schema}.forget_workflows(p_ids bigint[]) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $body$
    delete from {schema}.edges e where e.workflow_id = any (p_ids);
    delete from {schema}.drafts d where d.workflow_id = any (p_ids);
    delete from {schema}.nodes n where n.workflow_id = any (p_ids);
    delete from {schema}.workflows w where w.id = any (p_ids)
$body$;

-- Workflows that wait for an operator are told by alert, as quarantined jobs are.
drop index {schema}.events_to_tell;
create index events_to_tell on {schema}.events (transaction_id, id) where job_id is null or kind in ('quarantined', 'workflow_paused');
