-- Queue jobs again that have ended.

-- Queue a finished job again with fresh counters; its last attempt becomes history.
create or replace function {schema}.retry_v1(p_id bigint, p_by text) returns text
language plpgsql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
declare
    v_job record;
begin
    perform {schema}.lock_workflows(array[p_id]);
    select j.state, j.token, j.has_links into v_job from {schema}.jobs j where j.id = p_id for update;
    if not found then
        return 'missing';
    elsif v_job.state in ('pending', 'claimed', 'running', 'waiting') then
        return 'live';
    elsif v_job.state = 'succeeded' then
        return 'succeeded';
    end if;
    perform {schema}.requeue(array[p_id], p_by);
    if v_job.has_links then
        perform {schema}.revived(p_id, p_by);
    end if;
    return 'queued';
exception when unique_violation or sqlstate 'UQ001' then
    -- It is in use again, or that of the workflow which would go on with it.
    return 'duplicate';
end
$body$;

-- Queue jobs that have ended again with fresh counters; their last attempts become history. The caller has locked them.
create or replace function {schema}.requeue(p_ids bigint[], p_by text) returns void
language plpgsql volatile
{index_scans}
as $body$
declare
    v_now constant timestamptz := clock_timestamp();
begin
    insert into {schema}.attempts (
        job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
    select j.id, j.token, j.worker_id, coalesce(j.last_attempt_state, j.state), j.claimed_at, j.started_at, j.finished_at,
           least(b.beat_at, j.finished_at), j.error_code, coalesce(j.error_cause, j.error_message)
    from {schema}.jobs j left join {schema}.worker_heartbeats b on b.worker_id = j.worker_id
    where j.id = any (p_ids) and j.token is not null
    on conflict do nothing;
    insert into {schema}.events (at, kind, job_id, message)
    select v_now, 'retried', j.id, format('Queued again by %s (it was %s)', p_by, j.state)
    from {schema}.jobs j where j.id = any (p_ids) order by j.id;
    update {schema}.jobs j set
        state = 'pending', ready = j.concurrency_key is null, blocked = case when j.concurrency_key is not null then true end, scheduled = false,
        run_at = v_now, expires_at = null, token = null, worker_id = null,
        claimed_at = null, started_at = null, finished_at = null, failures = 0, crash_count = 0,
        -- What was quarantined runs alone: it killed every process that it was in.
        suspected_crashes = null, run_alone = case when j.state = 'quarantined' then true end,
        cancel_requested = null, unstopped = null, result = null, last_attempt_state = null, error_code = null, error_message = null,
        error_cause = null, error_details = null,
        -- One that is good for a period lives in a table of its own.
        active_key = case when j.unique_for is distinct from 'period' then j.unique_key end
    where j.id = any (p_ids);
end
$body$;

-- A job that had ended was queued again by an operator.
create or replace function {schema}.revived(p_id bigint, p_by text) returns void
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_outer constant boolean := {schema}.gather_keys();
    v_key text;
begin
    select j.concurrency_key into v_key from {schema}.jobs j where j.id = p_id;
    perform {schema}.admit(array[v_key]);
    perform {schema}.reopen(p_id, p_by);
    if v_outer then
        perform {schema}.admit_gathered();
    end if;
end
$body$;
