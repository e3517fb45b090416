-- Why processes died, how far running jobs say they are, and which jobs must run alone.

-- Changes nothing but locks the view, before its table: in the order of those who read it. Workers of the version before
-- may be at it, and the other way round is a deadlock with them.
alter view {schema}.held_jobs reset (security_barrier);

-- Deaths that other jobs shared, so that nobody knows whose doing they were: free, but not for ever.
alter table {schema}.jobs add column suspicions integer;
-- It may have killed a process that it shared with others: it gets one of its own.
alter table {schema}.jobs add column alone boolean;

-- One per attempt that died or had to be ended: it is read by people, and no rule decides by it.
-- Removed with its job by `forget` (0025): a foreign key would look for it with every job that is removed.
create table {schema}.autopsies (
    job_id bigint not null,
    token  bigint not null,
    body   jsonb not null,
    primary key (job_id, token)
);

-- One row per job that ever said how far it is, or whose interpreter fell silent; updated in place.
create table {schema}.progress (
    job_id     bigint primary key,
    token      bigint not null,
    at         double precision not null,
    done       double precision,
    total      double precision,
    message    text not null,
    -- Since when no Python code ran in its process; NULL while it does.
    busy_since double precision
) with (fillfactor = 50);

-- Every job in somebody's hands, with what the rules need to judge it.
create or replace view {schema}.held_jobs as
select j.id as job_id, j.token, j.worker_id, j.state, j.task, j.queue, coalesce(j.policy, ''::bytea) as policy,
       j.failures, j.crash_count as crashes, coalesce(j.cancel_requested, false) as cancel_requested, j.timeout_s,
       case when coalesce(j.heartbeat, true) then coalesce(j.heartbeat_timeout_s, v.running_stale_after_s) end
           as heartbeat_timeout_s,
       extract(epoch from clock_timestamp() - j.claimed_at)::double precision as held_s,
       coalesce(extract(epoch from clock_timestamp() - j.started_at), 0)::double precision as running_s,
       coalesce(v.silent_s, 'infinity'::double precision) as silent_s,
       coalesce(v.state, 'dead') as worker_state,
       coalesce(j.suspicions, 0) as suspicions
from {schema}.jobs j
left join {schema}.vitals v on v.worker_id = j.worker_id
where j.held;

-- Who runs past its hard deadline, and by how much more than it is given to end by itself. Asked for in every pass of a
-- reaper: without statistics, as in a new database, half of all jobs would be taken for held and the whole table read.
create function {schema}.overdue_v1(p_grace_s double precision, p_lost_grace_s double precision, p_limit integer)
returns setof {schema}.held_jobs
language sql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $body$
    select h.* from {schema}.held_jobs h
    where h.state = 'running' and h.timeout_s is not null
      -- Only watched time: a worker that could not be heard, or a clock that was set forward, is not past any deadline.
      and least(h.running_s, {schema}.watched_s(clock_timestamp() - make_interval(secs => h.running_s))) > h.timeout_s
          + case when h.worker_state in ('active', 'draining') then p_grace_s else p_lost_grace_s end
    order by h.job_id
    limit p_limit
$body$;


-- End attempts, whoever asks: one statement writes the job, the attempt that is over, why it died, and the event.
--
-- `p_endings` is a list of endings or of releases (which have no `attempt`, since user code never ran). Given back is
-- every pair that was asked for, and whether it was written. A row that is not there with this token, this holder and
-- a state that can end this way is superseded.
--
-- Plans: joined by the key alone, with the fence inside coalesce(), and the planner kept to nested loops over indexes:
-- statistics gathered while nothing was held must not turn this into a scan of the table.
create or replace function {schema}.apply_endings(p_worker text, p_endings jsonb, p_wait boolean)
returns table (job_id bigint, token bigint, written boolean)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $body$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
    v_free bigint[];
begin
    if not p_wait then
        -- A sweep takes what nobody else has in hand just now, and comes back for the rest.
        select array_agg(id) into v_free from (
            select j.id
            from jsonb_to_recordset(p_endings) as e(job_id bigint)
            join {schema}.jobs j on j.id = e.job_id
            for update of j skip locked
        ) locked;
    end if;
    return query
    with asked as materialized (
        select e.job_id, e.token, e.state, e.attempt, e.error, e.result, coalesce(e.delay_s, 0) as delay_s,
               coalesce(e.counter, 'none') as counter, e.event, coalesce(e.message, '') as message, e.autopsy
        from jsonb_to_recordset(p_endings) as e(
            job_id bigint, token bigint, state text, attempt text, error jsonb, result text, delay_s double precision,
            counter text, event text, message text, autopsy jsonb)
    ), before as materialized (
        -- A job that somebody asked to cancel does not go back to the queue.
        select j.id, j.token, j.state as was, j.claimed_at, j.started_at, a.attempt, a.error, a.result,
               a.delay_s, a.counter, a.event, a.message, a.autopsy,
               case when coalesce(a.state, 'pending') <> 'pending' then a.state
                    when coalesce(j.cancel_requested, false) then 'cancelled'
                    else 'pending' end as becomes,
               coalesce(a.state, 'pending') = 'pending' and coalesce(j.cancel_requested, false) as stopped,
               'cancelled by request ' || case when a.attempt is null then 'before it ran' else 'while it ran' end
                   || coalesce(' (' || coalesce(a.error ->> 'cause', a.error ->> 'message') || ')', '') as stop_cause
        from asked a
        join {schema}.jobs j on j.id = a.job_id
        where coalesce(j.held and j.token = a.token and j.worker_id = p_worker
                       and (j.state = 'running' or coalesce(a.state, 'pending') in ('pending', 'cancelled'))
                       and (p_wait or j.id = any (v_free)), false)
        for update of j
    ), past as (
        insert into {schema}.attempts (
            job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
        select b.id, b.token, p_worker, b.attempt, b.claimed_at, b.started_at, v_now,
               (select beat_at from {schema}.beats where worker_id = p_worker),
               b.error ->> 'code', coalesce(b.error ->> 'cause', b.error ->> 'message')
        from before b
        where b.becomes = 'pending' and b.was = 'running' and b.attempt is not null
        on conflict do nothing
    ), explained as (
        insert into {schema}.autopsies (job_id, token, body)
        select b.id, b.token, b.autopsy from before b where jsonb_typeof(b.autopsy) = 'object'
        on conflict (job_id, token) do update set body = excluded.body
    ), told as (
        insert into {schema}.events (at, kind, job_id, worker_id, message)
        select v_now, case when b.stopped then 'cancelled' else b.event end, b.id, p_worker,
               case when b.stopped then left('CANCELLED: ' || b.stop_cause, 500) else b.message end
        from before b
        where b.event is not null or b.stopped
    ), ended as (
        update {schema}.jobs j set
            state = b.becomes,
            held = false,
            ready = b.becomes = 'pending' and b.delay_s <= 0,
            waiting = b.becomes = 'pending' and b.delay_s > 0,
            run_at = case when b.becomes = 'pending' and b.attempt is not null
                          then v_now + make_interval(secs => b.delay_s) else j.run_at end,
            token = case when b.becomes <> 'pending' then j.token end,
            worker_id = case when b.becomes <> 'pending' then j.worker_id end,
            claimed_at = case when b.becomes <> 'pending' then j.claimed_at end,
            started_at = case when b.becomes <> 'pending' then j.started_at end,
            finished_at = case when b.becomes <> 'pending' then v_now end,
            -- A start that led nowhere is taken back: no attempt is spent.
            attempt = j.attempt - (b.attempt is null and b.was = 'running')::integer,
            failures = j.failures + (b.counter = 'failure')::integer,
            crash_count = j.crash_count + (b.counter = 'crash')::integer,
            suspicions = case when b.counter in ('suspicion', 'company') then coalesce(j.suspicions, 0) + 1
                              else j.suspicions end,
            alone = case when b.counter = 'suspicion' then true else j.alone end,
            result = decode(b.result, 'base64'),
            ended_as = case when b.stopped then 'cancelled' when b.becomes <> 'pending' then b.attempt end,
            live_key = case when b.becomes = 'pending' then j.live_key end,
            error_code = case when b.stopped then 'CANCELLED' when b.attempt is null then j.error_code
                              else b.error ->> 'code' end,
            error_message = case when b.stopped then 'Job was cancelled' when b.attempt is null then j.error_message
                                 else b.error ->> 'message' end,
            error_cause = case when b.stopped then b.stop_cause when b.attempt is null then j.error_cause
                               else b.error ->> 'cause' end,
            error_details = case when b.stopped then null when b.attempt is null then j.error_details
                                 else nullif(b.error -> 'details', '{}') end
        from before b
        where j.id = b.id
        returning b.token
    )
    select a.job_id, a.token, coalesce(a.token = any (array(select token from ended)), false)
    from asked a;
end
$body$;

-- Queue a finished job again with fresh counters; its last attempt becomes history.
create or replace function {schema}.retry_v1(p_id bigint, p_by text) returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_job record;
    v_now timestamptz;
begin
    select j.state, j.token into v_job from {schema}.jobs j where j.id = p_id for update;
    if not found then
        return 'missing';
    elsif v_job.state in ('pending', 'claimed', 'running') then
        return 'live';
    elsif v_job.state = 'succeeded' then
        return 'succeeded';
    end if;
    v_now := clock_timestamp();
    if v_job.token is not null then
        insert into {schema}.attempts (
            job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
        select j.id, j.token, j.worker_id, coalesce(j.ended_as, j.state), j.claimed_at, j.started_at, j.finished_at,
               least(b.beat_at, j.finished_at), j.error_code, coalesce(j.error_cause, j.error_message)
        from {schema}.jobs j left join {schema}.beats b on b.worker_id = j.worker_id
        where j.id = p_id
        on conflict do nothing;
    end if;
    update {schema}.jobs j set
        state = 'pending', ready = true, waiting = false, run_at = v_now, token = null, worker_id = null,
        claimed_at = null, started_at = null, finished_at = null, failures = 0, crash_count = 0,
        -- What was quarantined runs alone: it killed every process that it was in.
        suspicions = null, alone = case when v_job.state = 'quarantined' then true end,
        cancel_requested = null, result = null, ended_as = null, error_code = null, error_message = null,
        error_cause = null, error_details = null, live_key = j.unique_key
    where j.id = p_id;
    insert into {schema}.events (at, kind, job_id, message) values (v_now, 'retried', p_id, format('Queued again by %s (it was %s)', p_by, v_job.state));
    return 'queued';
exception when unique_violation then
    return 'duplicate';
end
$body$;
