-- Remove ended jobs, old events and dead workers.

-- Remove ended jobs with all that belongs to them. The caller has locked them. Ordinary jobs have no rows in the other
-- tables: one look at the range of ids says so, instead of one for each job. A unique key for a period stays.
create or replace function {schema}.forget(p_ids bigint[]) returns integer
language plpgsql volatile
{index_scans}
set jit = off
as $body$
declare
    v_low bigint;
    v_high bigint;
    v_removed integer;
begin
    select min(u.id), max(u.id) into v_low, v_high from unnest(p_ids) as u(id);
    if v_low is null then
        return 0;
    end if;
    if exists (select 1 from {schema}.attempts a where a.job_id between v_low and v_high) then
        delete from {schema}.attempts a where a.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.outputs o where o.job_id between v_low and v_high) then
        delete from {schema}.outputs o where o.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.autopsies y where y.job_id between v_low and v_high) then
        delete from {schema}.autopsies y where y.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.progress p where p.job_id between v_low and v_high) then
        delete from {schema}.progress p where p.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.reply_addresses l where l.job_id between v_low and v_high) then
        delete from {schema}.reply_addresses l where l.job_id = any (p_ids);
    end if;
    if exists (select 1 from {schema}.journal k where k.job_id between v_low and v_high)
       or exists (select 1 from {schema}.signals s where s.job_id between v_low and v_high) then
        perform {schema}.forget_journals(p_ids);
    end if;
    if exists (select 1 from {schema}.workflows w where w.id between v_low and v_high) then
        perform {schema}.forget_workflows(p_ids);
    end if;
    delete from {schema}.jobs j where j.id = any (p_ids);
    get diagnostics v_removed = row_count;
    return v_removed;
end
$body$;

-- Remove what is kept of workflows whose own jobs are removed.
create or replace function {schema}.forget_workflows(p_ids bigint[]) returns void
language sql volatile
{fixed_path}
as $body$
    delete from {schema}.workflow_edges e where e.workflow_id = any (p_ids);
    delete from {schema}.node_jobs d where d.workflow_id = any (p_ids);
    delete from {schema}.workflow_nodes n where n.workflow_id = any (p_ids);
    delete from {schema}.workflows w where w.id = any (p_ids)
$body$;

-- Remove finished jobs among the next `p_look` by id, and say where the look ended (`next_after`; NULL: at the last job, or
-- where jobs are younger than asked for), its last id, and the lowest id that was left. Walks the primary key, so that
-- retention costs the hot path no index.
create or replace function {schema}.prune_batch_v1(
    p_after bigint, p_older_than_s double precision, p_states text[], p_look integer,
    out next_after bigint, out removed integer, out last_id bigint, out lowest_left bigint)
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_now constant timestamptz := clock_timestamp();
    v_before constant timestamptz := v_now - make_interval(secs => p_older_than_s);
    v_seen bigint;
    v_young boolean;
    v_found bigint[];
    v_flows bigint[];
    v_old bigint[];
begin
    -- A job from the future (the clock was set back) says nothing of the age of those behind it.
    select count(*), max(x.id), coalesce(bool_or(x.enqueued_at > v_before and x.enqueued_at <= v_now), false),
           array_agg(x.id) filter (where x.old), min(x.id) filter (where not x.old),
           array_agg(distinct x.workflow_id) filter (where x.old and x.workflow_id is not null)
    into v_seen, last_id, v_young, v_found, lowest_left, v_flows
    from (
        select j.id, j.enqueued_at, j.workflow_id,
               coalesce(j.finished_at < v_before and (p_states is null or j.state = any (p_states))
                        -- Its task may have asked to keep it for longer.
                        and (j.retain_s is null or j.finished_at < v_now - make_interval(secs => j.retain_s)), false) as old
        from {schema}.jobs j where j.id > p_after order by j.id limit p_look
    ) x;
    removed := 0;
    if v_found is not null then
        -- Whoever opens one again has it in hand, and needs the results of its nodes.
        v_flows := case when v_flows is not null then {schema}.free_workflows(v_flows) end;
        -- Looked at once more under the lock: somebody may have retried it.
        select array_agg(y.id) into v_old from (
            select j.id from {schema}.jobs j
            where j.id = any (v_found)
              and coalesce(j.finished_at < v_before, false)
              -- Others may still need its result.
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w
                  where w.id = j.workflow_id and (w.finished_at is null or w.id <> all (coalesce(v_flows, '{}')))))
            for update skip locked
        ) y;
        removed := {schema}.forget(v_old);
        if removed < cardinality(v_found) then
            lowest_left := least(lowest_left, (
                select min(f.id) from (select unnest(v_found) as id except select unnest(v_old)) f));
        end if;
    end if;
    next_after := case when v_seen = p_look and not v_young then last_id end;
end
$body$;

-- One step of the walk of retention; says whether there is more of it at once. What was removed and is lost with the power is
-- removed again: the commit does not wait for the disk.
create or replace function {schema}.sweep_jobs_v1(
    p_older_than_s double precision, p_look integer, out removed integer, out more boolean)
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_walk {schema}.retention_positions;
    v_batch record;
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into {schema}.retention_positions (name) values ('jobs') on conflict do nothing;
    select * into v_walk from {schema}.retention_positions s where s.name = 'jobs' for update;
    select * into v_batch from {schema}.prune_batch_v1(v_walk.position, p_older_than_s, null, p_look);
    removed := v_batch.removed;
    more := v_batch.next_after is not null;
    v_walk.lowest_left := least(v_walk.lowest_left, v_batch.lowest_left);
    if more then
        v_walk.position := v_batch.next_after;
    else
        v_walk.position := coalesce(v_walk.lowest_left - 1, v_batch.last_id, v_walk.position);
        v_walk.lowest_left := null;
        if v_walk.whole_at not between clock_timestamp() - interval '1 day' and clock_timestamp() then
            v_walk.position := 0;
            v_walk.whole_at := clock_timestamp();
        end if;
    end if;
    update {schema}.retention_positions s set position = v_walk.position, lowest_left = v_walk.lowest_left, whole_at = v_walk.whole_at
    where s.name = 'jobs' and (s.position, s.lowest_left, s.whole_at)
          is distinct from (v_walk.position, v_walk.lowest_left, v_walk.whole_at);
end
$body$;

-- Ids go with time: looking at the first few is enough. An event from the future (the clock was set back) is passed over.
create or replace function {schema}.sweep_events_v1(p_older_than_s double precision, p_limit integer) returns integer
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_after bigint;
    v_last bigint;
    v_removed integer;
begin
    perform set_config('synchronous_commit', 'off', true);
    -- Once a day from the first one on: see `retention_positions`.
    select case when s.whole_at between clock_timestamp() - interval '1 day' and clock_timestamp() then s.position end
    into v_after from {schema}.retention_positions s where s.name = 'events';
    with first as (
        select e.id, e.at from {schema}.events e
        where e.id > coalesce(v_after, 0) and e.at <= clock_timestamp() order by e.id limit p_limit
    ), gone as (
        delete from {schema}.events e using first f
        where e.id = f.id and f.at < clock_timestamp() - make_interval(secs => p_older_than_s)
        returning e.id
    )
    select count(*), max(g.id) into v_removed, v_last from gone g;
    if v_after is null or v_removed > 0 then
        insert into {schema}.retention_positions as s (name, position) values ('events', coalesce(v_last, v_after, 0))
        on conflict (name) do update set
            position = excluded.position, whole_at = case when v_after is null then excluded.whole_at else s.whole_at end;
    end if;
    return v_removed;
end
$body$;

-- The tombstone stays until everything that the worker held is settled.
create or replace function {schema}.sweep_workers_v1(p_older_than_s double precision, p_limit integer) returns integer
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_removed integer;
begin
    with gone as (
        delete from {schema}.workers w
        where w.id in (
            select d.id from {schema}.workers d
            where d.state in ('dead', 'stopped') and d.stopped_at < clock_timestamp() - make_interval(secs => p_older_than_s)
              and not exists (select 1 from {schema}.jobs j where j.held and j.worker_id = d.id)
            limit p_limit
            for update skip locked)
        returning w.id
    ), unheard as (
        delete from {schema}.worker_heartbeats b using gone g where b.worker_id = g.id
    )
    select count(*) into v_removed from gone;
    return v_removed;
end
$body$;

-- Remove what was to be kept for a time of its own, and keys whose period is over.
create or replace function {schema}.sweep_kept_v1(p_limit integer, out jobs integer, out keys integer)
language plpgsql volatile
{plain_index_scans}
set lock_timeout = '400ms'
as $body$
declare
    v_keep_s double precision := -1;
    v_ids bigint[] := '{}';
    v_found bigint[];
    v_flows bigint[];
begin
    perform set_config('synchronous_commit', 'off', true);
    delete from {schema}.unique_keys k where k.key in (
        select o.key from {schema}.unique_keys o where o.until < now() order by o.until limit p_limit for update skip locked);
    get diagnostics keys = row_count;
    loop
        select j.retain_s into v_keep_s from {schema}.jobs j
        where j.retain_s is not null and j.finished_at is not null and j.retain_s > v_keep_s order by j.retain_s limit 1;
        exit when v_keep_s is null or cardinality(v_ids) >= p_limit;
        select array_agg(x.id), array_agg(distinct x.workflow_id) filter (where x.workflow_id is not null)
        into v_found, v_flows
        from (
            select j.id, j.workflow_id from {schema}.jobs j
            where j.retain_s = v_keep_s and j.finished_at is not null and j.finished_at < now() - make_interval(secs => v_keep_s)
              -- Others may still need its result.
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w where w.id = j.workflow_id and w.finished_at is null))
            order by j.finished_at limit p_limit - cardinality(v_ids)
        ) x;
        continue when v_found is null;
        -- Whoever opens one again has it in hand, and needs the results of its nodes.
        v_flows := case when v_flows is not null then {schema}.free_workflows(v_flows) end;
        v_ids := v_ids || array(
            select j.id from {schema}.jobs j
            where j.id = any (v_found) and coalesce(j.finished_at < now() - make_interval(secs => v_keep_s), false)
              and (j.workflow_id is null or not exists (
                  select 1 from {schema}.workflows w
                  where w.id = j.workflow_id and (w.finished_at is null or w.id <> all (coalesce(v_flows, '{}')))))
            for update skip locked);
    end loop;
    jobs := {schema}.forget(v_ids);
end
$body$;
