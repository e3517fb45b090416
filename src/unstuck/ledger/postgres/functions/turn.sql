-- The turn of a worker: hand in what ended, mark what starts, claim what comes.

-- One turn of the wheel: hand in what ended, mark what starts, take what comes, in one commit and one round trip. It also
-- writes entries of journals, tells all that are concerned of what ended, and enqueues what ended attempts asked to follow
-- them.
--
-- The rows given back are, in this order: what was claimed ('claimed'), what was superseded ('superseded'), stretches of
-- queues that need not be read again for a while ('gap', see `claim_around_gaps.sql`), and one last row that says how the
-- worker stands ('alive' or 'dead'), when the next scheduled job is due, and whether payloads were left out: the answer
-- stays small enough for the kernel to take it whole, so that a client frozen while it should read cannot keep this
-- transaction, and with it its identity row, open.
--
-- Of each job that was claimed, the place where the last row says when the next one is due says for how long it had been
-- due. `extras` says what belongs to it beside its payload: 1 a journal, 2 the results of those that it depends on.
create or replace function {schema}.turn_v1(
    p_worker text,
    p_done_ids bigint[], p_done_tokens bigint[], p_done_results bytea[],
    p_start_ids bigint[], p_start_tokens bigint[],
    p_endings jsonb, p_releases jsonb,
    p_output_ids bigint[], p_output_tokens bigint[], p_stdouts bytea[], p_stderrs bytea[],
    p_queues text[], p_tasks text[], p_limit integer, p_run_ahead boolean, p_start integer, p_gaps jsonb, p_entries jsonb,
    p_follow jsonb)
returns table (
    job_id bigint, token bigint, task text, queue text, running boolean, payload bytea, payload_type text, policy bytea,
    failures integer, crashes integer, attempt integer, suspected_crashes integer, run_alone boolean, kind text,
    due_in_s double precision, extras integer)
language plpgsql volatile
{nested_loops_in_order}
-- Whatever another session keeps for longer is left out of the turn by the worker (`blocked_outcomes`).
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    c_answer_bytes constant integer := 65536;
    c_claim_bytes constant integer := 8388608;
    c_many constant integer := 2000;
    v_writes boolean := p_done_ids is not null or p_start_ids is not null or p_endings is not null
                        or p_releases is not null or p_output_ids is not null or p_entries is not null;
    v_now timestamptz;
    v_written bigint[];
    v_ended bigint[] := '{}';
    v_linked bigint[] := '{}';
    v_linked_as text[] := '{}';
    v_more_linked bigint[];
    v_woken text[] := '{}';
    v_lost_ids bigint[] := '{}';
    v_lost_tokens bigint[] := '{}';
    v_more_ids bigint[];
    v_more_tokens bigint[];
    v_queues text[];
    v_ids bigint[];
    v_inline integer;
    v_left_out boolean := false;
    v_bytes bigint;
    v_begun timestamptz;
    v_read bigint;
    v_any boolean;
    v_cut boolean;
    v_drained boolean;
    v_limited text[];
    v_disabled boolean;
    v_taken integer;
    v_outer boolean;
    v_nodes bigint[];
    v_workflows bigint[];
    v_places integer[];
    v_hooked boolean;
    v_keyed boolean;
begin
    if p_limit > 0 then
        select array_agg(u.q order by u.n) filter (where k.concurrency is null and k.rate is null),
               array_agg(u.q order by u.q) filter (where k.concurrency is not null or k.rate is not null)
        into v_queues, v_limited
        from unnest(p_queues) with ordinality as u(q, n)
        left join {schema}.queues k on k.name = u.q
        where k.paused is not true;
    end if;

    -- An idle worker that finds nothing writes nothing: its poll costs no commit.
    if not v_writes then
        v_begun := clock_timestamp();
        v_read := {schema}.ready_entries_read();
        if p_gaps is null then
            v_any := {schema}.any_ready(v_queues, p_tasks);
        else
            v_any := {schema}.any_ready_around(v_queues, p_tasks, p_gaps);
        end if;
        if not v_any and v_limited is not null then
            v_any := {schema}.any_ready_within(v_limited, p_tasks);
        end if;
        if not v_any then
            if {schema}.ready_entries_read() - v_read > c_many then
                return query
                select null::bigint, g.to_id, null::text, q.name, null::boolean, null::bytea, null::text, null::bytea,
                       g.from_rank, g.to_rank, null::integer, null::integer, null::boolean, 'gap',
                       extract(epoch from clock_timestamp() - v_begun)::double precision, null::integer
                from unnest(v_queues) as q(name)
                cross join lateral {schema}.find_gap(q.name, p_tasks, null, true) g;
            end if;
            perform 1 from {schema}.workers w where w.id = p_worker and w.state in ('active', 'draining', 'suspect');
            kind := case when found then 'alive' else 'dead' end;
            due_in_s := {schema}.next_due_in_s(v_queues);
            if v_limited is not null then
                due_in_s := least(due_in_s, {schema}.next_due_in_s(v_limited), {schema}.room_in_s(v_limited, p_tasks));
            end if;
            return next;
            return;
        end if;
    end if;

    -- A verdict updates this row. Each statement below has a snapshot of its own, taken after this lock was won:
    -- so either the verdict sees all that this turn wrote, or this turn sees the verdict.
    select w.disabled is not null or exists (
        select 1 from {schema}.hosts h where h.name = w.host) into v_disabled
    from {schema}.workers w where w.id = p_worker and w.state in ('active', 'draining', 'suspect') for share of w;
    if not found then
        kind := 'dead';
        return next;
        return;
    end if;
    if v_disabled then
        -- It may not have heard of that yet.
        v_queues := null;
        v_limited := null;
    end if;
    -- Workflows before jobs (`lock_workflows`). Where there are none, jobs are not read for it.
    if v_writes and exists (select 1 from {schema}.workflows) then
        perform {schema}.lock_workflows(
            p_done_ids || array(select e.job_id from jsonb_to_recordset(p_endings) as e(job_id bigint))
            || array(select e.job_id from jsonb_to_recordset(p_releases) as e(job_id bigint)));
    end if;
    v_now := clock_timestamp();

    -- Before what ended: the last entry of an attempt may come with its end.
    if p_entries is not null then
        select array_agg(e.job_id), array_agg(e.token) into v_more_ids, v_more_tokens
        from {schema}.write_entries(p_worker, p_entries) e where not e.written;
        v_lost_ids := v_lost_ids || v_more_ids;
        v_lost_tokens := v_lost_tokens || v_more_tokens;
    end if;

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
                state = 'succeeded', held = false, finished_at = v_now, result = u.result, active_key = null,
                error_code = null, error_message = null, error_cause = null, error_details = null
            from unnest(p_done_ids, p_done_tokens, p_done_results) as u(id, token, result)
            where j.id = u.id and coalesce(j.token = u.token and j.state = 'running' and j.worker_id = p_worker, false)
            returning j.id, j.token, j.has_links, j.workflow_id, j.place, j.hooks is not null as hooked, j.concurrency_key is not null as keyed
        )
        select array_agg(token), array_agg(id) filter (where has_links), array_agg(id) filter (where workflow_id is not null),
               array_agg(workflow_id) filter (where workflow_id is not null),
               array_agg(place) filter (where workflow_id is not null), bool_or(hooked), bool_or(keyed)
        into v_written, v_more_linked, v_nodes, v_workflows, v_places, v_hooked, v_keyed
        from ended;
        if v_more_linked is not null then
            v_linked := v_more_linked;
            v_linked_as := array_fill('succeeded'::text, array[cardinality(v_linked)]);
        end if;
        v_ended := v_written;
        if cardinality(v_written) is distinct from cardinality(p_done_ids) then
            select array_agg(u.id), array_agg(u.token) into v_more_ids, v_more_tokens
            from unnest(p_done_ids, p_done_tokens) as u(id, token) where u.token <> all (coalesce(v_written, '{}'));
            v_lost_ids := v_lost_ids || v_more_ids;
            v_lost_tokens := v_lost_tokens || v_more_tokens;
        end if;
    end if;

    if p_endings is not null then
        select array_agg(e.job_id) filter (where not e.written), array_agg(e.token) filter (where not e.written),
               v_linked || array_agg(e.job_id) filter (where e.linked_as is not null),
               v_linked_as || array_agg(e.linked_as) filter (where e.linked_as is not null),
               v_ended || array_agg(e.token) filter (where e.written)
        into v_more_ids, v_more_tokens, v_linked, v_linked_as, v_ended
        from {schema}.apply_endings(p_worker, p_endings, true) e;
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
        select array_agg(e.job_id) filter (where not e.written), array_agg(e.token) filter (where not e.written),
               v_linked || array_agg(e.job_id) filter (where e.linked_as is not null),
               v_linked_as || array_agg(e.linked_as) filter (where e.linked_as is not null)
        into v_more_ids, v_more_tokens, v_linked, v_linked_as
        from {schema}.apply_endings(p_worker, p_releases, true) e;
        v_lost_ids := v_lost_ids || v_more_ids;
        v_lost_tokens := v_lost_tokens || v_more_tokens;
    end if;

    -- Once for all that ended in this turn: whoever else is concerned is told in the same commit.
    if p_follow is not null then
        v_outer := {schema}.gather_keys();
        v_woken := {schema}.settled(v_linked, v_linked_as) || {schema}.follow_up(p_follow, v_ended);
        if v_outer then
            v_woken := v_woken || {schema}.admit_gathered();
        end if;
    elsif p_endings is null and p_releases is null and v_more_linked is not null then
        -- They all succeeded, and what they are tied to is known.
        v_woken := {schema}.pass_on(v_linked, v_linked_as, v_nodes, v_workflows, v_places, v_hooked, v_keyed, v_now);
    elsif cardinality(v_linked) > 0 then
        v_woken := {schema}.settled(v_linked, v_linked_as);
    end if;

    if cardinality(v_queues) > 0 then
        v_begun := clock_timestamp();
        v_read := {schema}.ready_entries_read();
        if p_gaps is not null then
            select r.ids, r.payload_bytes into v_ids, v_bytes
            from {schema}.lock_ready_around(v_queues, p_tasks, p_limit, p_gaps) r;
        elsif cardinality(v_queues) = 1 then
            select r.ids, r.payload_bytes into v_ids, v_bytes from {schema}.lock_ready(v_queues[1], p_tasks, p_limit) r;
        else
            select r.ids, r.payload_bytes into v_ids, v_bytes
            from {schema}.lock_ready_of_many(v_queues, p_tasks, p_limit) r;
        end if;
        v_read := {schema}.ready_entries_read() - v_read;
        v_cut := v_bytes > c_claim_bytes and cardinality(v_ids) > 1;
        if v_cut then
            v_ids := {schema}.first_within_bytes(v_ids, c_claim_bytes);
        end if;
        v_drained := coalesce(cardinality(v_ids), 0) < p_limit and v_cut is not true;
    end if;
    if v_limited is not null and v_cut is not true then
        select r.ids, coalesce(v_bytes, 0) + r.payload_bytes, r.was_cut into v_ids, v_bytes, v_cut
        from {schema}.lock_ready_within(v_limited, p_tasks, p_limit, v_ids, c_claim_bytes) r;
        v_drained := coalesce(cardinality(v_ids), 0) < p_limit and v_cut is not true;
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
                attempt = j.attempt + (u.n <= p_start or p_run_ahead and coalesce(j.on_crash = 'retry', false))::integer,
                -- A key that is good while its job is pending is free from here on; who frees a place in a limited queue
                -- tells others of it.
                active_key = case when j.unique_for = 'pending' then null else j.active_key end,
                has_links = case when j.queue = any (v_limited) then true else j.has_links end
            from unnest(v_ids) with ordinality as u(id, n)
            where j.id = u.id and (j.expires_at is null or j.expires_at > v_now)
            returning j.id, j.token, j.task, j.queue, j.state, j.payload, j.payload_type, j.policy, j.failures,
                      j.crash_count, j.attempt, j.suspected_crashes, j.run_alone, j.journal, j.needs_inputs,
                      coalesce(j.run_at, j.enqueued_at) as due_at, u.n
        )
        select t.id, t.token, t.task, t.queue, t.state = 'running',
               case when octet_length(t.payload) <= v_inline then t.payload end,
               coalesce(t.payload_type, 'json'), coalesce(t.policy, ''::bytea), t.failures, t.crash_count,
               t.attempt + (t.state = 'claimed')::integer, coalesce(t.suspected_crashes, 0), coalesce(t.run_alone, false),
               'claimed', greatest(0, date_part('epoch', v_now - t.due_at)),
               coalesce(t.journal, false)::integer
                   + case when t.needs_inputs then 2 else 0 end
        from taken t
        -- In the order in which they were found, whatever plan the join above was given.
        order by t.n;
        get diagnostics v_taken = row_count;
        if v_taken < cardinality(v_ids) then
            v_woken := v_woken || {schema}.expire_found(v_ids, cardinality(v_linked) > 0 or p_follow is not null);
        end if;
    end if;

    if cardinality(v_lost_ids) > 0 then
        return query
        select u.id, u.token, null::text, null::text, null::boolean, null::bytea, null::text, null::bytea, null::integer,
               null::integer, null::integer, null::integer, null::boolean, 'superseded', null::double precision,
               null::integer
        from unnest(v_lost_ids, v_lost_tokens) as u(id, token);
    end if;

    if cardinality(v_woken) > 0 then
        return query
        select null::bigint, null::bigint, null::text, w.queue, null::boolean, null::bytea, null::text, null::bytea,
               null::integer, null::integer, null::integer, null::integer, null::boolean, 'woken', null::double precision,
               null::integer
        from unnest(v_woken) as w(queue) group by w.queue;
    end if;

    -- Of several queues each is looked at for as many as are wished, and then what is taken is read again.
    if v_read > c_many + 2 * p_limit * cardinality(v_queues) then
        return query
        select null::bigint, g.to_id, null::text, q.name, null::boolean, null::bytea, null::text, null::bytea,
               g.from_rank, g.to_rank, null::integer, null::integer, null::boolean, 'gap',
               extract(epoch from clock_timestamp() - v_begun)::double precision, null::integer
        from unnest(v_queues) as q(name)
        cross join lateral {schema}.find_gap(q.name, p_tasks, v_ids, v_drained) g;
    end if;

    kind := 'alive';
    running := v_left_out;
    run_alone := v_cut;
    if v_drained then
        due_in_s := {schema}.next_due_in_s(v_queues);
        if v_limited is not null then
            due_in_s := least(due_in_s, {schema}.next_due_in_s(v_limited), {schema}.room_in_s(v_limited, p_tasks));
        end if;
    elsif cardinality(v_linked) > 0 then
        due_in_s := {schema}.postponed_in_s_v1();
    end if;
    return next;
end
$body$;
