-- Cancel jobs that were not begun in time.

-- Cancel those of these jobs that were not begun in time; gives the queues in which others became ready by it. The caller
-- has locked them, and their workflows.
create or replace function {schema}.expire_those(p_ids bigint[]) returns text[]
language plpgsql volatile
{index_scans}
as $body$
declare
    v_linked bigint[];
begin
    with expired as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, scheduled = false, blocked = null, finished_at = clock_timestamp(), active_key = null,
            error_code = 'EXPIRED', error_message = 'Job expired before it began',
            error_cause = format('it waited for %s s and was good for %s s',
                round(date_part('epoch', clock_timestamp() - coalesce(j.run_at, j.enqueued_at))::numeric, 1)::double precision,
                round(date_part('epoch', j.expires_at - coalesce(j.run_at, j.enqueued_at))::numeric, 1)::double precision),
            error_details = null
        where j.id = any (p_ids) and j.state = 'pending' and j.expires_at <= clock_timestamp()
        returning j.id, j.has_links, j.error_cause
    ), told as (
        insert into {schema}.events (kind, job_id, message)
        select 'expired', e.id, 'EXPIRED: ' || e.error_cause from expired e
    )
    select array_agg(e.id order by e.id) filter (where e.has_links) into v_linked from expired e;
    return case when v_linked is null then '{}'
                else {schema}.settled(v_linked, array_fill('cancelled'::text, array[cardinality(v_linked)])) end;
end
$body$;

-- The same of jobs that a turn found instead of work. It has them in hand, and may not wait for a workflow any more; and
-- where it has held lines (`p_late`), not for lines either. What it leaves, the sweep finds.
create or replace function {schema}.expire_found(p_ids bigint[], p_late boolean) returns text[]
language plpgsql volatile
{index_scans}
as $body$
declare
    v_flows bigint[];
begin
    if not p_late then
        v_flows := {schema}.free_workflows(array(
            select j.workflow_id from {schema}.jobs j
            where j.id = any (p_ids) and j.workflow_id is not null and j.expires_at <= clock_timestamp()));
    end if;
    return {schema}.expire_those(array(
        select j.id from {schema}.jobs j
        where j.id = any (p_ids) and (j.has_links is null or not p_late and (j.workflow_id is null or j.workflow_id = any (v_flows)))));
end
$body$;

-- The sweep for them; a job that another session has locked just now is looked at when it is claimed.
create or replace function {schema}.expire_due_v1(
    p_limit integer, out expired integer, out next_in_s double precision, out queues text[])
language plpgsql volatile
{index_scans}
set enable_bitmapscan = off
set lock_timeout = '400ms'
as $body$
declare
    v_ids bigint[];
    v_flows bigint[];
begin
    v_ids := array(
        select j.id from {schema}.jobs j
        where j.expires_at is not null and (j.ready or j.scheduled or j.blocked) and j.expires_at <= now()
        order by j.expires_at limit p_limit);
    v_flows := {schema}.free_workflows(array(
        select distinct j.workflow_id from {schema}.jobs j where j.id = any (v_ids) and j.workflow_id is not null));
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j
        where j.id = any (v_ids) and j.state = 'pending' and j.expires_at <= now()
          and (j.workflow_id is null or j.workflow_id = any (v_flows)) for update skip locked) x;
    expired := coalesce(cardinality(v_ids), 0);
    queues := case when v_ids is null then '{}' else {schema}.expire_those(v_ids) end;
    select greatest(0, date_part('epoch', x.expires_at - clock_timestamp())) into next_in_s from (
        select j.expires_at from {schema}.jobs j
        where j.expires_at is not null and (j.ready or j.scheduled or j.blocked)
        order by j.expires_at limit 1) x;
end
$body$;
