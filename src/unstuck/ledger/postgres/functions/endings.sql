-- End attempts.

-- End attempts, for workers and reapers alike: one statement writes the job, the attempt that is over, why it died, and
-- the event.
--
-- `p_endings` is a list of endings or of releases (which have no `attempt`, since user code never ran). Given back is
-- every pair that was asked for, and whether it was written. A row that is not there with this token, this holder and
-- a state that can end this way is superseded. `linked_as` says how the attempt ended where others are concerned: the caller
-- tells them, once for all that it ends (`settled`).
--
-- Plans: joined by the key alone, with the fence inside coalesce(), and the planner kept to nested loops over indexes:
-- statistics gathered while nothing was held must not turn this into a scan of the table.
create or replace function {schema}.apply_endings(p_worker text, p_endings jsonb, p_wait boolean)
returns table (job_id bigint, token bigint, written boolean, linked_as text)
language plpgsql volatile
{nested_loops}
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
    elsif jsonb_path_exists(p_endings, '$[*].awaits_signal ? (@ != null)') then
        -- Whether a signal is there is asked under the lock under which it is sent: of what a statement computes, some
        -- may be computed before it has its locks.
        perform 1
        from jsonb_to_recordset(p_endings) as e(job_id bigint, awaits_signal text)
        join {schema}.jobs j on j.id = e.job_id
        where e.awaits_signal is not null
        for update of j;
    end if;
    return query
    with asked as materialized (
        select e.job_id, e.token, e.state, e.attempt, e.error, e.result, coalesce(e.delay_s, 0) as delay_s,
               coalesce(e.counter, 'none') as counter, e.event, coalesce(e.message, '') as message, e.autopsy, e.awaits_signal,
               coalesce(e.wakes, true) as wakes
        from jsonb_to_recordset(p_endings) as e(
            job_id bigint, token bigint, state text, attempt text, error jsonb, result text, delay_s double precision,
            counter text, event text, message text, autopsy jsonb, awaits_signal text,
            wakes boolean)
    ), found as materialized (
        -- A job that somebody asked to cancel does not go back to the queue.
        select j.id, j.token, j.state as was, j.claimed_at, j.started_at, a.attempt, a.error, a.result,
               a.delay_s, a.counter, a.event, a.message, a.autopsy,
               case -- What it was asked was taken back meanwhile: it is tried again.
                    when a.state = 'cancelled' and j.unstopped then 'pending'
                    when coalesce(a.state, 'pending') not in ('pending', 'waiting') then a.state
                    when coalesce(j.cancel_requested, false) then 'cancelled'
                    -- A signal that came while it ran is there already: nothing to wait for.
                    when a.awaits_signal is not null and {schema}.has_signal(j.id, a.awaits_signal) then 'pending'
                    else coalesce(a.state, 'pending') end as becomes,
               coalesce(a.state, 'pending') in ('pending', 'waiting') and coalesce(j.cancel_requested, false) as stopped,
               coalesce(a.state = 'cancelled' and j.unstopped, false) as unstopped,
               -- It never ran: it ends as one that was cancelled before a worker had it.
               a.attempt is null and coalesce(j.cancel_requested, false) as unrun,
               a.awaits_signal, a.wakes, coalesce(a.state = 'waiting', false) as suspends,
               -- What goes back without having run keeps its place in its line.
               a.attempt is not null and j.concurrency_key is not null as joins_key, j.has_links,
               'cancelled by request ' || case when a.attempt is null then 'before it ran' else 'while it ran' end
                   || coalesce(' (' || coalesce(a.error ->> 'cause', a.error ->> 'message') || ')', '') as stop_cause
        from asked a
        join {schema}.jobs j on j.id = a.job_id
        where coalesce(j.held and j.token = a.token and j.worker_id = p_worker
                       and (j.state = 'running' or coalesce(a.state, 'pending') in ('pending', 'cancelled'))
                       and (p_wait or j.id = any (v_free)), false)
        for update of j
    ), before as materialized (
        select f.*, f.becomes not in ('pending', 'waiting') as final from found f
    ), past as (
        insert into {schema}.attempts (
            job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
        select b.id, b.token, p_worker, b.attempt, b.claimed_at, b.started_at, v_now,
               (select beat_at from {schema}.worker_heartbeats where worker_id = p_worker),
               b.error ->> 'code', coalesce(b.error ->> 'cause', b.error ->> 'message')
        from before b
        where b.becomes in ('pending', 'waiting') and b.was = 'running' and b.attempt is not null
        on conflict do nothing
    ), explained as (
        insert into {schema}.autopsies (job_id, token, body)
        select b.id, b.token, b.autopsy from before b where jsonb_typeof(b.autopsy) = 'object'
        on conflict (job_id, token) do update set body = excluded.body
    ), told as (
        insert into {schema}.events (at, kind, job_id, worker_id, message)
        select v_now, case when b.stopped then 'cancelled' when b.unstopped then 'retried' else b.event end, b.id, p_worker,
               case when b.unrun then 'Job was ' || b.stop_cause
                    when b.stopped then left('CANCELLED: ' || b.stop_cause, 500)
                    when b.unstopped then 'Stopped, though that was taken back: it is tried again' else b.message end
        from before b
        where b.event is not null or b.stopped or b.unstopped
    ), ended as (
        update {schema}.jobs j set
            state = b.becomes,
            held = false,
            ready = b.becomes = 'pending' and (b.delay_s <= 0 or b.suspends) and not b.joins_key,
            blocked = case when b.becomes = 'pending' and (b.delay_s <= 0 or b.suspends) and b.joins_key then true end,
            scheduled = b.becomes = 'pending' and b.delay_s > 0 and not b.suspends or b.becomes = 'waiting' and b.wakes,
            awaits_signal = case when b.becomes = 'waiting' then b.awaits_signal end,
            -- What has begun does not expire any more.
            expires_at = case when b.attempt is null or b.was = 'claimed' then j.expires_at end,
            run_at = case when b.becomes in ('pending', 'waiting') and b.attempt is not null
                          then v_now + make_interval(secs => case when b.suspends and b.becomes = 'pending' then 0 else b.delay_s end)
                          else j.run_at end,
            token = case when b.final and not b.unrun then j.token end,
            worker_id = case when b.final and not b.unrun then j.worker_id end,
            claimed_at = case when b.final and not b.unrun then j.claimed_at end,
            started_at = case when b.final and not b.unrun then j.started_at end,
            finished_at = case when b.final then v_now end,
            -- A start that led nowhere is taken back: no attempt is spent.
            attempt = j.attempt - (b.attempt is null and b.was = 'running')::integer,
            failures = j.failures + (b.counter = 'failure')::integer,
            crash_count = j.crash_count + (b.counter = 'crash')::integer,
            suspected_crashes = case when b.counter in ('suspicion', 'company') then coalesce(j.suspected_crashes, 0) + 1
                              else j.suspected_crashes end,
            run_alone = case when b.counter = 'suspicion' then true else j.run_alone end,
            unstopped = case when b.final then j.unstopped end,
            result = decode(b.result, 'base64'),
            last_attempt_state = case when b.unrun then null when b.stopped then 'cancelled' when b.final then b.attempt end,
            active_key = case when not b.final then j.active_key end,
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
        returning b.id, b.token, case when b.has_links then case when b.stopped then 'cancelled' else b.attempt end end as linked_as
    )
    select e.id, e.token, true, e.linked_as from ended e
    union all
    select a.job_id, a.token, false, null from asked a where a.token <> all (array(select e.token from ended e));
end
$body$;
