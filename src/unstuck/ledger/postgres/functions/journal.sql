-- What jobs wrote down on their way.

-- Write entries of attempts that this worker still runs. The jobs are locked first: a session that takes an attempt
-- away waits for us, and the next attempt finds all that was written. What is there already is not written again: an
-- uncertain turn is repeated as it was.
create or replace function {schema}.write_entries(p_worker text, p_entries jsonb)
returns table (job_id bigint, token bigint, written boolean)
language plpgsql volatile
{nested_loops}
set enable_sort = on
as $body$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
    v_tokens bigint[];
    v_new bigint[];
begin
    select array_agg(x.token), array_agg(x.id) filter (where x.journal is null) into v_tokens, v_new
    from (
        select j.id, j.token, j.journal
        from (select distinct e.job_id, e.token from jsonb_to_recordset(p_entries) as e(job_id bigint, token bigint)) a
        join {schema}.jobs j on j.id = a.job_id
        where coalesce(j.token = a.token and j.state = 'running' and j.worker_id = p_worker, false)
        for update of j
    ) x;
    if v_new is not null then
        update {schema}.jobs j set journal = true where j.id = any (v_new);
    end if;
    if v_tokens is not null then
        insert into {schema}.journal as k (job_id, seq, kind, name, value, at, token)
        select e.job_id, e.seq, e.kind, e.name, decode(e.value, 'base64'), v_now, e.token
        from jsonb_to_recordset(p_entries)
             as e(job_id bigint, token bigint, seq integer, kind text, name text, value text)
        where e.seq > 0 and e.token = any (v_tokens)
        -- What it waited for takes the place of the waiting.
        on conflict (job_id, seq) do update
        set kind = excluded.kind, value = excluded.value, at = excluded.at, token = excluded.token
        where k.kind = 'wait' and excluded.kind in ('signal', 'timeout');

        -- Of several checkpoints of one job the last stands.
        insert into {schema}.journal as k (job_id, seq, kind, name, value, at, token)
        select distinct on (e.job_id) e.job_id, 0, e.kind, e.name, decode(e.value, 'base64'), v_now, e.token
        from rows from (jsonb_to_recordset(p_entries) as (job_id bigint, token bigint, seq integer, kind text, name text,
                                                          value text))
             with ordinality as e(job_id, token, seq, kind, name, value, n)
        where e.seq = 0 and e.token = any (v_tokens)
        order by e.job_id, e.n desc
        on conflict (job_id, seq) do update set value = excluded.value, at = excluded.at, token = excluded.token;

        update {schema}.signals s set taken_seq = e.seq
        from jsonb_to_recordset(p_entries) as e(job_id bigint, token bigint, seq integer, signal integer)
        where s.job_id = e.job_id and s.number = e.signal and s.taken_seq is null and e.token = any (v_tokens);
    end if;
    return query
    select distinct e.job_id, e.token, coalesce(e.token = any (v_tokens), false)
    from jsonb_to_recordset(p_entries) as e(job_id bigint, token bigint);
end
$body$;

-- Enqueue what ended attempts asked for; give the queues in which workers may find it.
create or replace function {schema}.follow_up(p_follow jsonb, p_ended bigint[]) returns text[]
language plpgsql volatile
{fixed_path}
as $body$
declare
    v record;
begin
    select array_agg(nextval('{schema}.job_ids'::regclass)) as ids, array_agg(j.queue) as queues, array_agg(j.task) as tasks,
           array_agg(decode(j.payload, 'base64')) as payloads, array_agg(nullif(j.payload_type, 'json')) as payload_types,
           array_agg(nullif(decode(j.policy, 'base64'), ''::bytea)) as policies,
           array_agg(nullif(j.on_crash, 'fail')) as on_crash,
           array_agg(case when not j.heartbeat then false end) as heartbeats,
           array_agg(j.heartbeat_timeout_s) as heartbeat_timeouts_s, array_agg(j.timeout_s) as timeouts_s,
           array_agg(-j.priority) as ranks, array_agg(nullif(j.delay_s, 0)) as delays_s, array_agg(j.run_at) as runs_at,
           case when bool_or(j.unique_key is not null) then array_agg(j.unique_key) end as unique_keys,
           array_agg(j.enqueued_by) as enqueued_by,
           case when bool_or(j.more is not null) then array_agg(j.more) end as more,
           array_agg(distinct j.queue) filter (where j.run_at is null and j.delay_s = 0) as woken
    into v
    from jsonb_to_recordset(p_follow) as f(token bigint, job jsonb)
    cross join lateral jsonb_to_record(f.job) as j(
        task text, queue text, payload text, payload_type text, policy text, on_crash text, heartbeat boolean,
        heartbeat_timeout_s double precision, timeout_s double precision, priority integer, delay_s double precision,
        run_at double precision, unique_key text, enqueued_by text, more jsonb)
    where f.token = any (p_ended);
    if v.ids is null then
        return '{}';
    end if;
    perform {schema}.enqueue_v1(
        v.ids, v.queues, v.tasks, v.payloads, v.payload_types, v.policies, v.on_crash, v.heartbeats,
        v.heartbeat_timeouts_s, v.timeouts_s, v.ranks, v.delays_s, v.runs_at, v.unique_keys, v.enqueued_by, v.more);
    return coalesce(v.woken, '{}');
end
$body$;

create or replace function {schema}.forget_journals(p_ids bigint[]) returns void
language plpgsql volatile
{index_scans}
as $body$
begin
    delete from {schema}.journal k where k.job_id = any (p_ids);
    delete from {schema}.signals s where s.job_id = any (p_ids);
end
$body$;
