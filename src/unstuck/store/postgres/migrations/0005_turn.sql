-- One turn of the wheel: hand in what ended, mark what starts, take what comes, in one commit and one round trip.
--
-- The rows given back are, in this order: what was claimed ('claimed'), what was superseded ('superseded'), and one last
-- row that says how the worker stands ('alive' or 'dead'), when the next scheduled job is due, and whether payloads were
-- left out: the answer stays small enough for the kernel to take it whole, so that a client frozen while it should read
-- cannot keep this transaction, and with it its identity row, open.
create function {schema}.turn_v1(
    p_worker text,
    p_done_ids bigint[], p_done_tokens bigint[], p_done_results bytea[],
    p_start_ids bigint[], p_start_tokens bigint[],
    p_endings jsonb, p_releases jsonb,
    p_output_ids bigint[], p_output_tokens bigint[], p_stdouts bytea[], p_stderrs bytea[],
    p_queues text[], p_tasks text[], p_limit integer, p_run_ahead boolean, p_start integer)
returns table (
    job_id bigint, token bigint, task text, queue text, running boolean, payload bytea, payload_type text, policy bytea,
    failures integer, crashes integer, attempt integer, kind text, due_in_s double precision)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
set enable_incremental_sort = off
set jit = off
as $body$
#variable_conflict use_column
declare
    c_answer_bytes constant integer := 65536;
    v_writes boolean := p_done_ids is not null or p_start_ids is not null or p_endings is not null
                        or p_releases is not null or p_output_ids is not null;
    v_now timestamptz;
    v_written bigint[];
    v_lost_ids bigint[] := '{}';
    v_lost_tokens bigint[] := '{}';
    v_more_ids bigint[];
    v_more_tokens bigint[];
    v_queues text[];
    v_ids bigint[];
    v_inline integer;
    v_left_out boolean := false;
    v_bytes bigint;
begin
    if p_limit > 0 then
        select array_agg(q order by n) into v_queues
        from unnest(p_queues) with ordinality as u(q, n)
        where not exists (select 1 from {schema}.queues k where k.name = u.q and k.paused);
    end if;

    -- An idle worker that finds nothing writes nothing: its poll costs no commit.
    if not v_writes and not {schema}.any_ready(v_queues, p_tasks) then
        perform 1 from {schema}.workers w where w.id = p_worker and w.state in ('active', 'draining', 'suspect');
        kind := case when found then 'alive' else 'dead' end;
        due_in_s := {schema}.next_due_in_s(v_queues);
        return next;
        return;
    end if;

    -- A verdict updates this row. Each statement below has a snapshot of its own, taken after this lock was won:
    -- so either the verdict sees all that this turn wrote, or this turn sees the verdict.
    perform 1 from {schema}.workers w where w.id = p_worker and w.state in ('active', 'draining', 'suspect') for share;
    if not found then
        kind := 'dead';
        return next;
        return;
    end if;
    v_now := clock_timestamp();

    if p_output_ids is not null then
        insert into {schema}.outputs (job_id, token, stdout, stderr)
        select u.id, u.token, u.stdout, u.stderr
        from unnest(p_output_ids, p_output_tokens, p_stdouts, p_stderrs) as u(id, token, stdout, stderr)
        join {schema}.jobs j on j.id = u.id
        where coalesce(j.token = u.token and j.held and j.worker_id = p_worker, false)
        on conflict do nothing;
    end if;

    -- Joined on the key alone, with the fence inside coalesce(): see `apply_endings` on plans. What was written is told
    -- by token: a worker may hand in an attempt that it lost together with the one that it has of the same job.
    if p_done_ids is not null then
        with ended as (
            update {schema}.jobs j set
                state = 'succeeded', held = false, finished_at = v_now, result = u.result, live_key = null,
                error_code = null, error_message = null, error_cause = null, error_details = null
            from unnest(p_done_ids, p_done_tokens, p_done_results) as u(id, token, result)
            where j.id = u.id and coalesce(j.token = u.token and j.state = 'running' and j.worker_id = p_worker, false)
            returning j.token
        ) select array_agg(token) into v_written from ended;
        if cardinality(v_written) is distinct from cardinality(p_done_ids) then
            select array_agg(u.id), array_agg(u.token) into v_more_ids, v_more_tokens
            from unnest(p_done_ids, p_done_tokens) as u(id, token) where u.token <> all (coalesce(v_written, '{}'));
            v_lost_ids := v_lost_ids || v_more_ids;
            v_lost_tokens := v_lost_tokens || v_more_tokens;
        end if;
    end if;

    if p_endings is not null then
        select array_agg(e.job_id), array_agg(e.token) into v_more_ids, v_more_tokens
        from {schema}.apply_endings(p_worker, p_endings, true) e where not e.written;
        v_lost_ids := v_lost_ids || v_more_ids;
        v_lost_tokens := v_lost_tokens || v_more_tokens;
    end if;

    if p_start_ids is not null then
        with started as (
            update {schema}.jobs j set state = 'running', started_at = v_now, attempt = j.attempt + 1
            from unnest(p_start_ids, p_start_tokens) as u(id, token)
            where j.id = u.id and coalesce(j.token = u.token and j.state = 'claimed' and j.worker_id = p_worker, false)
            returning j.token
        ) select array_agg(token) into v_written from started;
        if cardinality(v_written) is distinct from cardinality(p_start_ids) then
            select array_agg(u.id), array_agg(u.token) into v_more_ids, v_more_tokens
            from unnest(p_start_ids, p_start_tokens) as u(id, token) where u.token <> all (coalesce(v_written, '{}'));
            v_lost_ids := v_lost_ids || v_more_ids;
            v_lost_tokens := v_lost_tokens || v_more_tokens;
        end if;
    end if;

    if p_releases is not null then
        select array_agg(e.job_id), array_agg(e.token) into v_more_ids, v_more_tokens
        from {schema}.apply_endings(p_worker, p_releases, true) e where not e.written;
        v_lost_ids := v_lost_ids || v_more_ids;
        v_lost_tokens := v_lost_tokens || v_more_tokens;
    end if;

    if cardinality(v_queues) > 0 then
        if cardinality(v_queues) = 1 then
            select r.ids, r.payload_bytes into v_ids, v_bytes from {schema}.lock_ready(v_queues[1], p_tasks, p_limit) r;
        else
            select r.ids, r.payload_bytes into v_ids, v_bytes
            from {schema}.lock_ready_of_many(v_queues, p_tasks, p_limit) r;
        end if;
    end if;

    if v_ids is not null then
        -- Later than every ending above: a job that this turn gave back may be among what it takes.
        v_now := clock_timestamp();
        v_left_out := v_bytes > c_answer_bytes;
        v_inline := case when v_left_out then c_answer_bytes / cardinality(v_ids) else 2147483647 end;
        return query
        with taken as (
            update {schema}.jobs j set
                ready = false, held = true, token = nextval('{schema}.tokens'::regclass), worker_id = p_worker,
                claimed_at = v_now,
                state = case when u.n <= p_start or p_run_ahead and j.on_crash = 'retry' then 'running'
                             else 'claimed' end,
                started_at = case when u.n <= p_start or p_run_ahead and j.on_crash = 'retry' then v_now end,
                attempt = j.attempt + (u.n <= p_start or p_run_ahead and coalesce(j.on_crash = 'retry', false))::integer
            from unnest(v_ids) with ordinality as u(id, n)
            where j.id = u.id
            returning j.id, j.token, j.task, j.queue, j.state, j.payload, j.payload_type, j.policy, j.failures,
                      j.crash_count, j.attempt
        )
        select t.id, t.token, t.task, t.queue, t.state = 'running',
               case when octet_length(t.payload) <= v_inline then t.payload end,
               coalesce(t.payload_type, 'json'), coalesce(t.policy, ''::bytea), t.failures, t.crash_count,
               t.attempt + (t.state = 'claimed')::integer, 'claimed', null::double precision
        from taken t;
    end if;

    if cardinality(v_lost_ids) > 0 then
        return query
        select u.id, u.token, null::text, null::text, null::boolean, null::bytea, null::text, null::bytea, null::integer,
               null::integer, null::integer, 'superseded', null::double precision
        from unnest(v_lost_ids, v_lost_tokens) as u(id, token);
    end if;

    kind := 'alive';
    running := v_left_out;
    if cardinality(v_queues) > 0 and coalesce(cardinality(v_ids), 0) < p_limit then
        due_in_s := {schema}.next_due_in_s(v_queues);
    end if;
    return next;
end
$body$;
