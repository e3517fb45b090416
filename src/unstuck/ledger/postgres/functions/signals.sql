-- Signals to jobs.

create or replace function {schema}.has_signal(p_job bigint, p_name text) returns boolean
language plpgsql volatile
{fixed_path}
as $body$
begin
    return exists (
        select 1 from {schema}.signals s where s.job_id = p_job and s.name = p_name and s.taken_seq is null);
end
$body$;

-- Keep a signal for a job, and wake the job if that is what it waits for. The lock on the job is what makes it sure: a job
-- that is about to wait for it looks for signals under the same lock.
create or replace function {schema}.signal_v1(p_job bigint, p_name text, p_value bytea, p_by text, p_limit integer)
returns table (answer text, queue text)
language plpgsql volatile
{index_scans}
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    c_max_bytes constant bigint := 16 * 1024 * 1024;
    v_job record;
    v_kept bigint;
    v_kept_bytes bigint;
    v_last integer;
begin
    select j.state, j.awaits_signal, j.queue, j.concurrency_key, j.journal, j.blocked, j.place, j.finished_at into v_job
    from {schema}.jobs j where j.id = p_job for update;
    if not found then
        return query select 'missing', null::text;
        return;
    elsif v_job.finished_at is not null then
        return query select 'finished', null::text;
        return;
    elsif v_job.place = 0 then
        -- It stands for a workflow and waits for that alone: nobody would ever take a signal.
        return query select 'workflow', null::text;
        return;
    end if;
    select
        count(*) filter (where s.taken_seq is null),
        coalesce(sum(octet_length(s.value)) filter (where s.taken_seq is null), 0),
        max(s.number)
    into v_kept, v_kept_bytes, v_last
    from {schema}.signals s where s.job_id = p_job;
    if v_kept >= p_limit or v_kept_bytes + octet_length(p_value) > c_max_bytes then
        return query select 'full', null::text;
        return;
    end if;
    insert into {schema}.signals (job_id, number, name, value, at, sent_by)
    values (p_job, coalesce(v_last, 0) + 1, p_name, p_value, clock_timestamp(), p_by);
    insert into {schema}.events (kind, job_id, message)
    values ('signalled', p_job, format('Signal ''%s'' was sent by %s', p_name, p_by));
    if v_job.state = 'waiting' and coalesce(v_job.awaits_signal = p_name, false) then
        update {schema}.jobs j set
            state = 'pending', ready = j.concurrency_key is null, blocked = case when j.concurrency_key is not null then true end,
            scheduled = false, awaits_signal = null, run_at = clock_timestamp(), journal = true
        where j.id = p_job;
        if v_job.concurrency_key is not null then
            perform {schema}.admit(array[v_job.concurrency_key]);
        end if;
        return query select 'woken', v_job.queue;
        return;
    end if;
    if v_job.journal is null then
        update {schema}.jobs j set journal = true where j.id = p_job;
    end if;
    if v_job.blocked then
        -- Whoever gave a place back meanwhile passed it over, because we have it in hand.
        return query select 'kept', ({schema}.admit(array[v_job.concurrency_key]))[1];
        return;
    end if;
    return query select 'kept', null::text;
end
$body$;
