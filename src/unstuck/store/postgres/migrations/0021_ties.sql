-- What a job may be tied to beyond itself: a workflow, a line, follow-up work, a journal, a signal. All of it is NULL for
-- the plain job, and one flag (`tied`) says whether anybody else is concerned when it ends. What each tie means is in
-- the files that follow; this one lets every way in and every way out of a job call them.

-- Changes nothing but locks the view, before its table: in the order of those who read it (see 0010).
alter view {schema}.held_jobs reset (security_barrier);

alter table {schema}.jobs
    add column tied boolean,
    -- Pending, and not let in yet: so many of its line are at work as may be.
    add column blocked boolean,
    add column line text,
    add column workflow_id bigint,
    add column place integer,
    -- It is given results of others with its claim.
    add column needs boolean,
    -- It was asked to stop with its workflow, and that was taken back: should it stop all the same, it is tried again.
    add column unstopped boolean,
    -- The tasks that follow its ends, by kind of end.
    add column hooks jsonb,
    -- It wrote something down on its way, or was sent a signal: whoever tries it again needs that.
    add column journal boolean,
    -- The signal that it waits for.
    add column awaits text,
    add column expires_at timestamptz,
    -- How long it is kept after its end, where its task says so.
    add column keep_s double precision;

-- Not looked at for the rows that are there: what they may be is allowed as before.
alter table {schema}.jobs drop constraint whole_in_its_state;
alter table {schema}.jobs add constraint whole_in_its_state check (
    case state
        when 'pending' then (ready::integer + waiting::integer + coalesce(blocked, false)::integer = 1) and not held
                            and token is null and worker_id is null and finished_at is null
                            and (not waiting or run_at is not null) and (not coalesce(blocked, false) or line is not null)
        when 'waiting' then not (held or ready or coalesce(blocked, false)) and token is null and worker_id is null
                            and finished_at is null and (waiting and run_at is not null or awaits is not null)
        when 'claimed' then held and not (ready or waiting or coalesce(blocked, false)) and token is not null
                            and worker_id is not null and claimed_at is not null and finished_at is null
        when 'running' then held and not (ready or waiting or coalesce(blocked, false)) and token is not null
                            and worker_id is not null and started_at is not null and finished_at is null
        when 'succeeded' then not (held or ready or waiting or coalesce(blocked, false)) and finished_at is not null
        when 'failed' then not (held or ready or waiting or coalesce(blocked, false)) and finished_at is not null
                           and error_code is not null
        when 'cancelled' then not (held or ready or waiting or coalesce(blocked, false)) and finished_at is not null
                              and error_code is not null
        when 'quarantined' then not (held or ready or waiting or coalesce(blocked, false)) and finished_at is not null
                                and error_code is not null
        else false
    end) not valid;
alter table {schema}.jobs add constraint place_in_a_workflow check ((workflow_id is null) = (place is null)) not valid;

create index jobs_blocked on {schema}.jobs (line, rank, id) where blocked;
create index jobs_awaiting on {schema}.jobs (id) where awaits is not null;

alter table {schema}.attempts drop constraint attempts_state_check;
alter table {schema}.attempts add constraint attempts_state_check check (
    state in ('succeeded', 'failed', 'crashed', 'drained', 'cancelled', 'suspended')) not valid;

-- End attempts, whoever asks: one statement writes the job, the attempt that is over, why it died, and the event.
--
-- `p_endings` is a list of endings or of releases (which have no `attempt`, since user code never ran). Given back is
-- every pair that was asked for, and whether it was written. A row that is not there with this token, this holder and
-- a state that can end this way is superseded. `tied_as` says how the attempt ended where others are concerned: the caller
-- tells them, once for all that it ends (`settled`).
--
-- Plans: joined by the key alone, with the fence inside coalesce(), and the planner kept to nested loops over indexes:
-- statistics gathered while nothing was held must not turn this into a scan of the table.
drop function {schema}.apply_endings(text, jsonb, boolean);
create function {schema}.apply_endings(p_worker text, p_endings jsonb, p_wait boolean)
returns table (job_id bigint, token bigint, written boolean, tied_as text)
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
    elsif jsonb_path_exists(p_endings, '$[*].awaits ? (@ != null)') then
        -- Whether a signal is there is asked under the lock under which it is sent: of what a statement computes, some
        -- may be computed before it has its locks.
        perform 1
        from jsonb_to_recordset(p_endings) as e(job_id bigint, awaits text)
        join {schema}.jobs j on j.id = e.job_id
        where e.awaits is not null
        for update of j;
    end if;
    return query
    with asked as materialized (
        select e.job_id, e.token, e.state, e.attempt, e.error, e.result, coalesce(e.delay_s, 0) as delay_s,
               coalesce(e.counter, 'none') as counter, e.event, coalesce(e.message, '') as message, e.autopsy, e.awaits,
               coalesce(e.wakes, true) as wakes
        from jsonb_to_recordset(p_endings) as e(
            job_id bigint, token bigint, state text, attempt text, error jsonb, result text, delay_s double precision,
            counter text, event text, message text, autopsy jsonb, awaits text,
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
                    when a.awaits is not null and {schema}.has_signal(j.id, a.awaits) then 'pending'
                    else coalesce(a.state, 'pending') end as becomes,
               coalesce(a.state, 'pending') in ('pending', 'waiting') and coalesce(j.cancel_requested, false) as stopped,
               coalesce(a.state = 'cancelled' and j.unstopped, false) as unstopped,
               a.awaits, a.wakes, coalesce(a.state = 'waiting', false) as suspends,
               -- What goes back without having run keeps its place in its line.
               a.attempt is not null and j.line is not null as lines_up, j.tied,
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
               (select beat_at from {schema}.beats where worker_id = p_worker),
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
               case when b.stopped then left('CANCELLED: ' || b.stop_cause, 500)
                    when b.unstopped then 'Stopped, though that was taken back: it is tried again' else b.message end
        from before b
        where b.event is not null or b.stopped or b.unstopped
    ), ended as (
        update {schema}.jobs j set
            state = b.becomes,
            held = false,
            ready = b.becomes = 'pending' and (b.delay_s <= 0 or b.suspends) and not b.lines_up,
            blocked = case when b.becomes = 'pending' and (b.delay_s <= 0 or b.suspends) and b.lines_up then true end,
            waiting = b.becomes = 'pending' and b.delay_s > 0 and not b.suspends or b.becomes = 'waiting' and b.wakes,
            awaits = case when b.becomes = 'waiting' then b.awaits end,
            -- What has begun does not expire any more.
            expires_at = case when b.attempt is null or b.was = 'claimed' then j.expires_at end,
            run_at = case when b.becomes in ('pending', 'waiting') and b.attempt is not null
                          then v_now + make_interval(secs => b.delay_s) else j.run_at end,
            token = case when b.final then j.token end,
            worker_id = case when b.final then j.worker_id end,
            claimed_at = case when b.final then j.claimed_at end,
            started_at = case when b.final then j.started_at end,
            finished_at = case when b.final then v_now end,
            -- A start that led nowhere is taken back: no attempt is spent.
            attempt = j.attempt - (b.attempt is null and b.was = 'running')::integer,
            failures = j.failures + (b.counter = 'failure')::integer,
            crash_count = j.crash_count + (b.counter = 'crash')::integer,
            suspicions = case when b.counter in ('suspicion', 'company') then coalesce(j.suspicions, 0) + 1
                              else j.suspicions end,
            alone = case when b.counter = 'suspicion' then true else j.alone end,
            unstopped = case when b.final then j.unstopped end,
            result = decode(b.result, 'base64'),
            ended_as = case when b.stopped then 'cancelled' when b.final then b.attempt end,
            live_key = case when not b.final then j.live_key end,
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
        returning b.id, b.token, case when b.tied then case when b.stopped then 'cancelled' else b.attempt end end as tied_as
    )
    select e.id, e.token, true, e.tied_as from ended e
    union all
    select a.job_id, a.token, false, null from asked a where a.token <> all (array(select e.token from ended e));
end
$body$;

-- Store jobs under ids that the caller reserved before, so that an uncertain enqueue can be repeated as it was.
--
-- Given back are only the jobs that were not stored because a live job has their unique key, by their place in the
-- batch (from 1), with the id of that job. NULL for a whole array stands for the default in every row. `p_more` has what
-- few jobs have: line and line_limit, hooks, expires_in_s, keep_s, and for their unique keys unique,
-- unique_for_s and on_duplicate (see 0025).
drop function {schema}.enqueue_v1(
    bigint[], text[], text[], bytea[], text[], bytea[], text[], boolean[], double precision[], double precision[], integer[],
    double precision[], double precision[], text[], text[]);
create function {schema}.enqueue_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns table (place bigint, job_id bigint)
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
    c_rounds constant integer := 100;
    v_left bigint[];
    v_owners bigint[];
    v_kept bigint[];
    v_keepers bigint[];
    v_peculiar constant boolean := p_more is not null and p_unique_keys is not null;
    -- The transaction goes on after this, perhaps for long: it must take no lock that workers need.
    v_later constant boolean := v_peculiar and exists (select 1 from unnest(p_more) as m where m ? 'later');
    v_outer boolean := false;
begin
    if v_peculiar then
        -- Who is replaced leaves a line, before we join ours.
        v_outer := {schema}.gather_lines();
        -- Keys that are kept for a period are in a table of their own: who finds one there is not stored.
        select array_agg(k.place), array_agg(k.job_id) into v_kept, v_keepers from {schema}.keep_keys(p_ids, p_unique_keys, p_more) k;
        return query select * from unnest(v_kept, v_keepers);
    end if;
    for i in 1 .. c_rounds loop
        -- Both conflicts are good news: the id means that a repeated enqueue had been stored, the key that the
        -- job is there already. Keys go in in their order, so that two batches cannot wait for each other; by bytes,
        -- as the client puts in order what it sends in several pieces.
        insert into {schema}.jobs (
            id, queue, task, payload, payload_type, policy, on_crash, heartbeat, heartbeat_timeout_s, timeout_s, rank,
            enqueued_at, run_at, ready, waiting, blocked, unique_key, live_key, enqueued_by, tied, line,
            hooks, expires_at, keep_s, line_limit, unique_for)
        select u.id, u.queue, u.task, u.payload, u.payload_type, u.policy, u.on_crash, u.heartbeat,
               u.heartbeat_timeout_s, u.timeout_s, coalesce(u.rank, 0), t.now, r.run_at,
               coalesce(r.run_at <= t.now, true) and m.line is null, coalesce(r.run_at > t.now, false) or m.later,
               case when m.line is not null and coalesce(r.run_at <= t.now, true) and not m.later then true end, u.unique_key,
               case when m.unique_for is distinct from 'period' then u.unique_key end,
               u.enqueued_by, case when m.line is not null or m.hooks is not null then true end, m.line, m.hooks,
               greatest(t.now, r.run_at) + make_interval(secs => m.expires_in_s), m.keep_s, m.line_limit, m.unique_for
        from unnest(p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                    p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more)
             with ordinality as u(id, queue, task, payload, payload_type, policy, on_crash, heartbeat,
                    heartbeat_timeout_s, timeout_s, rank, delay_s, run_at, unique_key, enqueued_by, more, n)
        cross join (select clock_timestamp() as now) t
        cross join lateral (
            -- Who may not stand in line while their transaction lasts is due at once, and let in when it is there.
            select coalesce(to_timestamp(u.run_at), t.now + make_interval(secs => u.delay_s),
                            case when u.more ? 'line' and u.more ? 'later' then t.now end) as run_at
        ) r
        cross join lateral (
            select u.more ->> 'line' as line, u.more -> 'hooks' as hooks,
                   (u.more ->> 'expires_in_s')::double precision as expires_in_s,
                   (u.more ->> 'keep_s')::double precision as keep_s, (u.more ->> 'line_limit')::integer as line_limit,
                   case when u.more ? 'unique_for_s' then 'period' else u.more ->> 'unique' end as unique_for,
                   coalesce(u.more ? 'line' and u.more ? 'later', false) and coalesce(r.run_at <= t.now, true) as later
        ) m
        where (v_left is null or u.n = any (v_left)) and u.n <> all (coalesce(v_kept, '{}'))
        order by u.unique_key collate "C", u.n
        on conflict do nothing;
        exit when p_unique_keys is null;

        -- Who is not there under its own id must be there under its key, unless that job ended in between.
        select array_agg(u.place order by u.place), array_agg(o.id order by u.place) into v_left, v_owners
        from unnest(p_ids, p_unique_keys) with ordinality as u(id, unique_key, place)
        left join lateral (select j.id from {schema}.jobs j where j.live_key = u.unique_key) o on true
        where u.unique_key is not null and u.place <> all (coalesce(v_kept, '{}'))
              and not exists (select 1 from {schema}.jobs j where j.id = u.id);
        exit when v_left is null;
        if not (v_peculiar and {schema}.replace_owners(v_left, v_owners, p_ids, p_more))
           and array_position(v_owners, null) is null then
            return query select * from unnest(v_left, v_owners);
            exit;
        end if;
        if i = c_rounds then
            raise exception 'unique keys changed hands % times during one enqueue', c_rounds using errcode = '40001';
        end if;
    end loop;
    -- Last: who holds a line waits for nobody.
    if p_more is not null then
        perform {schema}.line_up(p_more);
    end if;
    if v_outer and v_later then
        perform {schema}.postpone_gathered();
    elsif v_outer then
        perform {schema}.let_in_gathered();
    end if;
end
$body$;

-- Say whether it is the first request with this key within so many seconds, and keep the key.
create function {schema}.is_first(p_key bytea, p_fingerprint bytea, p_keep_s double precision) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    -- Whoever comes clears away a few that are too old: so the table stays as small as what comes in.
    c_cleared constant integer := 20;
    v_before constant timestamptz := clock_timestamp() - make_interval(secs => p_keep_s);
begin
    delete from {schema}.requests r
    where r.key in (
        select o.key from {schema}.requests o where o.at < v_before order by o.at limit c_cleared for update skip locked);
    -- The second of two who come at once with the same key waits here until the first has committed.
    insert into {schema}.requests as r (key, fingerprint, job_ids, fresh)
    values (p_key, p_fingerprint, array[]::bigint[], array[]::boolean[])
    on conflict (key) do update set fingerprint = excluded.fingerprint, at = clock_timestamp() where r.at < v_before;
    return found;
end
$body$;

-- As it was (0018), with `p_more`.
drop function {schema}.enqueue_once_v1(
    bytea, bytea, double precision, bigint[], text[], text[], bytea[], text[], bytea[], text[], boolean[], double precision[], double precision[], integer[],
    double precision[], double precision[], text[], text[]);
create function {schema}.enqueue_once_v1(
    p_key bytea, p_fingerprint bytea, p_keep_s double precision,
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[])
returns table (first boolean, fingerprint bytea, job_ids bigint[], fresh boolean[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_first constant boolean := {schema}.is_first(p_key, p_fingerprint, p_keep_s);
begin
    if v_first then
        update {schema}.requests r
        set (job_ids, fresh) = (
            select array_agg(coalesce(k.job_id, i.id) order by i.place), array_agg(k.job_id is null order by i.place)
            from unnest(p_ids) with ordinality as i(id, place)
            left join {schema}.enqueue_v1(
                p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
                p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more) k
                on k.place = i.place)
        where r.key = p_key;
    end if;
    return query select v_first, r.fingerprint, r.job_ids, r.fresh from {schema}.requests r where r.key = p_key;
end
$body$;

-- As it was (0020), with `p_more`.
drop function {schema}.post_v1(
    bigint[], text[], text[], bytea[], text[], bytea[], text[], boolean[], double precision[], double precision[], integer[],
    double precision[], double precision[], text[], text[],
    bytea[], text[], text[], integer[], integer[], bytea[], text[], boolean[]);
create function {schema}.post_v1(
    p_ids bigint[], p_queues text[], p_tasks text[], p_payloads bytea[], p_payload_types text[], p_policies bytea[],
    p_on_crash text[], p_heartbeats boolean[], p_heartbeat_timeouts_s double precision[],
    p_timeouts_s double precision[], p_ranks integer[], p_delays_s double precision[], p_runs_at double precision[],
    p_unique_keys text[], p_enqueued_by text[], p_more jsonb[],
    p_clients bytea[], p_services text[], p_request_ids text[], p_letter_places integer[], p_letters integer[],
    p_correlations bytea[], p_own_ids text[], p_notifies boolean[])
returns table (place bigint, job_id bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_places bigint[];
    v_known bigint[];
begin
    select array_agg(k.place), array_agg(k.job_id) into v_places, v_known
    from {schema}.enqueue_v1(
        p_ids, p_queues, p_tasks, p_payloads, p_payload_types, p_policies, p_on_crash, p_heartbeats,
        p_heartbeat_timeouts_s, p_timeouts_s, p_ranks, p_delays_s, p_runs_at, p_unique_keys, p_enqueued_by, p_more) k;
    if v_known is not null then
        -- Nobody removes them from here on; who was removed before gets no letter.
        perform 1 from {schema}.jobs j where j.id = any (v_known) order by j.id for key share;
    end if;
    insert into {schema}.letters as l (
        job_id, client, service, request_id, place, places, correlation, own_id, notify)
    -- Of two that came with one key the last is answered.
    select distinct on (coalesce(k.job_id, u.id))
           coalesce(k.job_id, u.id), u.client, u.service, u.request_id, u.letter_place, u.letters, u.correlation, u.own_id,
           u.notify
    from unnest(p_ids, p_clients, p_services, p_request_ids, p_letter_places, p_letters, p_correlations, p_own_ids,
                p_notifies)
         with ordinality as u(id, client, service, request_id, letter_place, letters, correlation, own_id, notify, place)
    left join unnest(v_places, v_known) as k(place, job_id) on k.place = u.place
    where u.client is not null
      and (k.job_id is null or exists (select 1 from {schema}.jobs j where j.id = k.job_id))
    order by coalesce(k.job_id, u.id), u.place desc
    on conflict (job_id) do update set
        client = excluded.client, service = excluded.service, request_id = excluded.request_id, place = excluded.place,
        places = excluded.places, correlation = excluded.correlation, own_id = excluded.own_id, notify = excluded.notify,
        answered_at = null;
    return query select u.place, u.job_id from unnest(v_places, v_known) as u(place, job_id);
end
$body$;

-- End attempts of somebody else, if the guard still holds; gives what was written, and the queues (without a job) in which
-- others became ready by it.
drop function {schema}.settle_v1(text, jsonb, jsonb, text, double precision);
create function {schema}.settle_v1(
    p_worker text, p_endings jsonb, p_releases jsonb, p_guard text, p_silent_s double precision)
returns table (job_id bigint, token bigint, woken text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_part jsonb;
    v_ids bigint[];
    v_tokens bigint[];
    v_as text[];
    v_tied bigint[] := '{}';
    v_tied_as text[] := '{}';
begin
    -- The word of the kernel or of an operator needs no look at the worker: the token alone is the fence.
    if p_guard <> 'none' and not {schema}.guard_holds(p_worker, p_guard, p_silent_s) then
        return;
    end if;
    perform {schema}.lock_workflows(
        array(select e.job_id from jsonb_to_recordset(p_endings) as e(job_id bigint))
        || array(select e.job_id from jsonb_to_recordset(p_releases) as e(job_id bigint)));
    foreach v_part in array array[p_endings, p_releases] loop
        continue when v_part is null;
        select array_agg(e.job_id), array_agg(e.token), v_tied || array_agg(e.job_id) filter (where e.tied_as is not null),
               v_tied_as || array_agg(e.tied_as) filter (where e.tied_as is not null)
        into v_ids, v_tokens, v_tied, v_tied_as
        from {schema}.apply_endings(p_worker, v_part, false) e where e.written;
        return query select u.id, u.token, null::text from unnest(v_ids, v_tokens) as u(id, token);
    end loop;
    return query
    select null::bigint, null::bigint, w.queue from unnest({schema}.settled(v_tied, v_tied_as)) as w(queue) group by w.queue;
end
$body$;

-- The turn of the wheel as in `0016_counters`, but that it also writes entries of journals, tells whoever is concerned of what
-- ended, and enqueues what ended attempts asked to follow them. `extras` says of a job that was claimed what belongs to it
-- beside its payload: 1 a journal, 2 the results of those that it depends on.
drop function {schema}.turn_v1(
    text, bigint[], bigint[], bytea[], bigint[], bigint[], jsonb, jsonb, bigint[], bigint[], bytea[], bytea[], text[], text[],
    integer, boolean, integer, jsonb);
create function {schema}.turn_v1(
    p_worker text,
    p_done_ids bigint[], p_done_tokens bigint[], p_done_results bytea[],
    p_start_ids bigint[], p_start_tokens bigint[],
    p_endings jsonb, p_releases jsonb,
    p_output_ids bigint[], p_output_tokens bigint[], p_stdouts bytea[], p_stderrs bytea[],
    p_queues text[], p_tasks text[], p_limit integer, p_run_ahead boolean, p_start integer, p_gaps jsonb, p_entries jsonb,
    p_follow jsonb)
returns table (
    job_id bigint, token bigint, task text, queue text, running boolean, payload bytea, payload_type text, policy bytea,
    failures integer, crashes integer, attempt integer, suspicions integer, alone boolean, kind text,
    due_in_s double precision, extras integer)
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
-- Whatever another session keeps for longer is left out of the turn by the worker (`blocked_outcomes`).
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    c_answer_bytes constant integer := 65536;
    c_many constant integer := 2000;
    v_writes boolean := p_done_ids is not null or p_start_ids is not null or p_endings is not null
                        or p_releases is not null or p_output_ids is not null or p_entries is not null;
    v_now timestamptz;
    v_written bigint[];
    v_ended bigint[] := '{}';
    v_tied bigint[] := '{}';
    v_tied_as text[] := '{}';
    v_more_tied bigint[];
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
    v_drained boolean;
    v_limited text[];
    v_disabled boolean;
    v_taken integer;
    v_outer boolean;
    v_nodes bigint[];
    v_workflows bigint[];
    v_places integer[];
    v_hooked boolean;
    v_lined boolean;
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
        select 1 from {schema}.hosts h where h.name = w.host and h.disabled is not null) into v_disabled
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
                state = 'succeeded', held = false, finished_at = v_now, result = u.result, live_key = null,
                error_code = null, error_message = null, error_cause = null, error_details = null
            from unnest(p_done_ids, p_done_tokens, p_done_results) as u(id, token, result)
            where j.id = u.id and coalesce(j.token = u.token and j.state = 'running' and j.worker_id = p_worker, false)
            returning j.id, j.token, j.tied, j.workflow_id, j.place, j.hooks is not null as hooked, j.line is not null as lined
        )
        select array_agg(token), array_agg(id) filter (where tied), array_agg(id) filter (where workflow_id is not null),
               array_agg(workflow_id) filter (where workflow_id is not null),
               array_agg(place) filter (where workflow_id is not null), bool_or(hooked), bool_or(lined)
        into v_written, v_more_tied, v_nodes, v_workflows, v_places, v_hooked, v_lined
        from ended;
        if v_more_tied is not null then
            v_tied := v_more_tied;
            v_tied_as := array_fill('succeeded'::text, array[cardinality(v_tied)]);
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
               v_tied || array_agg(e.job_id) filter (where e.tied_as is not null),
               v_tied_as || array_agg(e.tied_as) filter (where e.tied_as is not null),
               v_ended || array_agg(e.token) filter (where e.written)
        into v_more_ids, v_more_tokens, v_tied, v_tied_as, v_ended
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
               v_tied || array_agg(e.job_id) filter (where e.tied_as is not null),
               v_tied_as || array_agg(e.tied_as) filter (where e.tied_as is not null)
        into v_more_ids, v_more_tokens, v_tied, v_tied_as
        from {schema}.apply_endings(p_worker, p_releases, true) e;
        v_lost_ids := v_lost_ids || v_more_ids;
        v_lost_tokens := v_lost_tokens || v_more_tokens;
    end if;

    -- Once for all that ended in this turn: whoever else is concerned is told in the same commit.
    if p_follow is not null then
        v_outer := {schema}.gather_lines();
        v_woken := {schema}.settled(v_tied, v_tied_as) || {schema}.follow_up(p_follow, v_ended);
        if v_outer then
            v_woken := v_woken || {schema}.let_in_gathered();
        end if;
    elsif p_endings is null and p_releases is null and v_more_tied is not null then
        -- They all succeeded, and what they are tied to is known.
        v_woken := {schema}.pass_on(v_tied, v_tied_as, v_nodes, v_workflows, v_places, v_hooked, v_lined, v_now);
    elsif cardinality(v_tied) > 0 then
        v_woken := {schema}.settled(v_tied, v_tied_as);
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
        v_drained := coalesce(cardinality(v_ids), 0) < p_limit;
    end if;
    if v_limited is not null then
        select r.ids, coalesce(v_bytes, 0) + r.payload_bytes into v_ids, v_bytes
        from {schema}.lock_ready_within(v_limited, p_tasks, p_limit, v_ids) r;
        v_drained := coalesce(cardinality(v_ids), 0) < p_limit;
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
                live_key = case when j.unique_for = 'pending' then null else j.live_key end,
                tied = case when j.queue = any (v_limited) then true else j.tied end
            from unnest(v_ids) with ordinality as u(id, n)
            where j.id = u.id and (j.expires_at is null or j.expires_at > v_now)
            returning j.id, j.token, j.task, j.queue, j.state, j.payload, j.payload_type, j.policy, j.failures,
                      j.crash_count, j.attempt, j.suspicions, j.alone, j.journal, j.needs,
                      coalesce(j.run_at, j.enqueued_at) as due_at, u.n
        )
        select t.id, t.token, t.task, t.queue, t.state = 'running',
               case when octet_length(t.payload) <= v_inline then t.payload end,
               coalesce(t.payload_type, 'json'), coalesce(t.policy, ''::bytea), t.failures, t.crash_count,
               t.attempt + (t.state = 'claimed')::integer, coalesce(t.suspicions, 0), coalesce(t.alone, false),
               'claimed', greatest(0, date_part('epoch', v_now - t.due_at)),
               coalesce(t.journal, false)::integer
                   + case when t.needs then 2 else 0 end
        from taken t
        -- In the order in which they were found, whatever plan the join above was given.
        order by t.n;
        get diagnostics v_taken = row_count;
        if v_taken < cardinality(v_ids) then
            v_woken := v_woken || {schema}.expire_found(v_ids, cardinality(v_tied) > 0 or p_follow is not null);
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
    if v_drained then
        due_in_s := {schema}.next_due_in_s(v_queues);
        if v_limited is not null then
            due_in_s := least(due_in_s, {schema}.next_due_in_s(v_limited), {schema}.room_in_s(v_limited, p_tasks));
        end if;
    elsif cardinality(v_tied) > 0 then
        due_in_s := {schema}.postponed_in_s_v1();
    end if;
    return next;
end
$body$;

-- Let these workers hear at their next beats that jobs of theirs were asked to stop. In the order of their ids, as those beat
-- whose beats come together: two who took them as they came to them would wait for each other.
create function {schema}.flag_cancels(p_workers text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
begin
    if p_workers is not null then
        perform 1 from {schema}.beats b where b.worker_id = any (p_workers) order by b.worker_id for update;
        update {schema}.beats b set cancels = true where b.worker_id = any (p_workers);
    end if;
end
$body$;

-- Cancel what waits or was only claimed; ask for what runs, and tell its worker at its next beat.
--
-- Of several jobs those that somebody has in hand just now are left alone ('busy'): a turn locks jobs in an order of its
-- own, and whoever waits for one while holding another would wait for ever. One job alone is waited for.
create or replace function {schema}.cancel_v1(p_ids bigint[], p_by text)
returns table (job_id bigint, answer text, worker_id text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set lock_timeout = '500ms'
as $body$
#variable_conflict use_column
declare
    v_free bigint[];
    v_tied bigint[];
    v_workers text[];
begin
    perform {schema}.lock_workflows(p_ids);
    if cardinality(p_ids) = 1 then
        perform 1 from {schema}.jobs j where j.id = p_ids[1] for update;
    end if;
    select array_agg(x.id) into v_free from (
        select j.id from unnest(p_ids) as u(id) join {schema}.jobs j on j.id = u.id for update of j skip locked
    ) x;
    select array_agg(j.id order by j.id) filter (where j.tied and j.state in ('pending', 'claimed', 'waiting')),
           array_agg(j.worker_id) filter (where j.state = 'running')
    into v_tied, v_workers
    from {schema}.jobs j where j.id = any (v_free);
    return query
    with asked as materialized (
        select distinct u.id from unnest(p_ids) as u(id)
    ), found as materialized (
        select j.id, j.state, j.worker_id from {schema}.jobs j where j.id = any (v_free)
    ), stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, held = false, blocked = null, awaits = null, finished_at = clock_timestamp(),
            token = null, worker_id = null, claimed_at = null, live_key = null,
            error_code = 'CANCELLED', error_message = 'Job was cancelled', error_cause = 'cancelled by ' || p_by || ' before it ran',
            error_details = null
        from found f
        where j.id = f.id and f.state in ('pending', 'claimed', 'waiting')
        returning j.id
    ), asked_to_stop as (
        update {schema}.jobs j set cancel_requested = true, unstopped = null
        from found f
        where j.id = f.id and f.state = 'running'
        returning j.workflow_id, j.place
    ), meant as (
        update {schema}.nodes n set unstop = null
        from asked_to_stop s
        where n.workflow_id = s.workflow_id and n.place = s.place and coalesce(n.unstop, false)
    ), told as (
        insert into {schema}.events (kind, job_id, worker_id, message)
        select case when f.state = 'running' then 'cancel_requested' else 'cancelled' end, f.id, f.worker_id,
               case when f.state = 'running' then p_by || ' asked to cancel it'
                    else 'Cancelled by ' || p_by || ' before it ran' end
        from found f
        where f.state in ('pending', 'claimed', 'waiting', 'running')
    )
    select a.id,
           case when f.id is null then
                    case when exists (select 1 from {schema}.jobs j where j.id = a.id) then 'busy' else 'missing' end
                when f.state in ('pending', 'claimed', 'waiting') then 'cancelled'
                when f.state = 'running' then 'requested'
                else 'finished' end,
           case when f.state in ('claimed', 'running') then f.worker_id end
    from asked a left join found f on f.id = a.id;
    perform {schema}.flag_cancels(v_workers);
    if v_tied is not null then
        perform {schema}.settled(v_tied, array_fill('cancelled'::text, array[cardinality(v_tied)]));
    end if;
end
$body$;

-- Some of what waits in a queue, and is in nobody's hands. What a worker is claiming at this moment is its own.
create function {schema}.to_purge_v1(p_queue text, p_limit integer) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_ids bigint[];
begin
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j where j.ready and j.queue = p_queue limit p_limit for update skip locked) x;
    if v_ids is null then
        select array_agg(x.id) into v_ids from (
            select j.id from {schema}.jobs j where j.waiting and j.queue = p_queue limit p_limit for update skip locked) x;
    end if;
    if v_ids is null then
        select array_agg(x.id) into v_ids from (
            select j.id from {schema}.jobs j where j.blocked and j.queue = p_queue limit p_limit for update skip locked) x;
    end if;
    return v_ids;
end
$body$;

-- Cancel those of these jobs that still wait, and give how many. Found in a transaction of its own (`to_purge`): here
-- workflows are locked before jobs.
create function {schema}.purge_v1(p_ids bigint[], p_cause text) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set lock_timeout = '500ms'
as $body$
declare
    v_ids bigint[];
    v_tied bigint[];
begin
    perform {schema}.lock_workflows(p_ids);
    select array_agg(x.id) into v_ids from (
        select j.id from {schema}.jobs j where j.id = any (p_ids) and (j.ready or j.waiting or j.blocked)
        for update skip locked) x;
    with stopped as (
        update {schema}.jobs j set
            state = 'cancelled', ready = false, waiting = false, blocked = null, awaits = null,
            finished_at = clock_timestamp(), live_key = null, error_code = 'CANCELLED',
            error_message = 'Job was cancelled', error_cause = p_cause, error_details = null
        where j.id = any (v_ids)
        returning j.id, j.tied
    ) select array_agg(s.id order by s.id) filter (where s.tied) into v_tied from stopped s;
    if v_tied is not null then
        perform {schema}.settled(v_tied, array_fill('cancelled'::text, array[cardinality(v_tied)]));
    end if;
    return coalesce(cardinality(v_ids), 0);
end
$body$;

-- Queue jobs that have ended again with fresh counters; their last attempts become history. Whoever calls has locked them.
create function {schema}.requeue(p_ids bigint[], p_by text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $body$
declare
    v_now constant timestamptz := clock_timestamp();
begin
    insert into {schema}.attempts (
        job_id, token, worker_id, state, claimed_at, started_at, ended_at, last_heartbeat_at, code, cause)
    select j.id, j.token, j.worker_id, coalesce(j.ended_as, j.state), j.claimed_at, j.started_at, j.finished_at,
           least(b.beat_at, j.finished_at), j.error_code, coalesce(j.error_cause, j.error_message)
    from {schema}.jobs j left join {schema}.beats b on b.worker_id = j.worker_id
    where j.id = any (p_ids) and j.token is not null
    on conflict do nothing;
    insert into {schema}.events (at, kind, job_id, message)
    select v_now, 'retried', j.id, format('Queued again by %s (it was %s)', p_by, j.state)
    from {schema}.jobs j where j.id = any (p_ids) order by j.id;
    update {schema}.jobs j set
        state = 'pending', ready = j.line is null, blocked = case when j.line is not null then true end, waiting = false,
        run_at = v_now, expires_at = null, token = null, worker_id = null,
        claimed_at = null, started_at = null, finished_at = null, failures = 0, crash_count = 0,
        -- What was quarantined runs alone: it killed every process that it was in.
        suspicions = null, alone = case when j.state = 'quarantined' then true end,
        cancel_requested = null, unstopped = null, result = null, ended_as = null, error_code = null, error_message = null,
        error_cause = null, error_details = null,
        -- One that is good for a period lives in a table of its own.
        live_key = case when j.unique_for is distinct from 'period' then j.unique_key end
    where j.id = any (p_ids);
end
$body$;

-- Queue a finished job again.
create or replace function {schema}.retry_v1(p_id bigint, p_by text) returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $body$
declare
    v_job record;
begin
    perform {schema}.lock_workflows(array[p_id]);
    select j.state, j.token, j.tied into v_job from {schema}.jobs j where j.id = p_id for update;
    if not found then
        return 'missing';
    elsif v_job.state in ('pending', 'claimed', 'running', 'waiting') then
        return 'live';
    elsif v_job.state = 'succeeded' then
        return 'succeeded';
    end if;
    perform {schema}.requeue(array[p_id], p_by);
    if v_job.tied then
        perform {schema}.revived(p_id);
    end if;
    return 'queued';
exception when unique_violation or sqlstate 'UQ001' then
    -- It is in use again, or that of the workflow which would go on with it.
    return 'duplicate';
end
$body$;

-- Make ready what is due: scheduled jobs, retries, and those that slept long enough or waited too long for a signal. Who
-- stands in a line is let in by it, and so is whoever could not be let in before (`admit_postponed`): their queues are given
-- with a count of 0. Rows that somebody else has in hand just now are for the next round. now(), and not
-- clock_timestamp(): a bound that might move during the statement cannot end the walk along the index.
create function {schema}.promote_due_v1(p_limit integer) returns table (queue text, count bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_queues text[];
    v_lines text[];
    v_woken text[] := '{}';
begin
    with due as materialized (
        select id from {schema}.jobs where waiting and run_at <= now() order by run_at limit p_limit for update skip locked
    ), promoted as (
        update {schema}.jobs j set
            state = 'pending', ready = j.line is null, blocked = case when j.line is not null then true end,
            waiting = false, awaits = null
        from due where j.id = due.id
        returning j.queue, j.line
    )
    select array_agg(queue), array_agg(distinct line) filter (where line is not null) into v_queues, v_lines from promoted;
    if v_lines is not null then
        v_woken := {schema}.admit(v_lines);
    end if;
    v_woken := v_woken || {schema}.admit_postponed(1000);
    return query
    select u.queue, sum(u.n)::bigint
    from (select q.queue, 1 as n from unnest(v_queues) as q(queue) union all select w.queue, 0 from unnest(v_woken) as w(queue)) u
    group by u.queue;
end
$body$;

-- Tell whoever else is concerned that attempts at these jobs ended, each as it ended (`succeeded`, `failed`, `crashed`,
-- `drained`, `cancelled`, `suspended`). In the transaction that ended them, whoever that was. Gives the queues in which
-- jobs became ready by it.
--
-- Whoever calls has locked the workflows, before the jobs (`lock_workflows`). Lines come last and all at once
-- (`gather_lines`): a node that a workflow releases may stand in the line that another node of it leaves, and who holds a line
-- waits for nobody.
create function {schema}.settled(p_ids bigint[], p_as text[]) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set cpu_tuple_cost = 10
set join_collapse_limit = 1
as $body$
declare
    v_nodes bigint[];
    v_workflows bigint[];
    v_places integer[];
    v_hooked boolean;
    v_lined boolean;
begin
    if cardinality(p_ids) = 0 then
        return '{}';
    end if;
    select array_agg(j.id) filter (where j.workflow_id is not null and j.finished_at is not null),
           array_agg(j.workflow_id) filter (where j.workflow_id is not null and j.finished_at is not null),
           array_agg(j.place) filter (where j.workflow_id is not null and j.finished_at is not null),
           bool_or(j.hooks is not null), bool_or(j.line is not null)
    into v_nodes, v_workflows, v_places, v_hooked, v_lined
    from unnest(p_ids) as u(id)
    join {schema}.jobs j on j.id = u.id;
    return {schema}.pass_on(p_ids, p_as, v_nodes, v_workflows, v_places, v_hooked, v_lined, null);
end
$body$;

-- As `settled`, for whoever knows what these jobs are tied to: which of them are over and nodes of workflows, and at which
-- places; whether any has hooks or stands in a line; and, where all of them succeeded, when.
create function {schema}.pass_on(
    p_ids bigint[], p_as text[], p_nodes bigint[], p_workflows bigint[], p_places integer[], p_hooked boolean,
    p_lined boolean, p_succeeded_at timestamptz) returns text[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_outer constant boolean := {schema}.gather_lines();
    v_woken text[] := '{}';
begin
    if p_nodes is not null then
        v_woken := {schema}.advance(p_nodes, p_workflows, p_places, p_succeeded_at);
    end if;
    if p_hooked then
        v_woken := v_woken || {schema}.fire_hooks(p_ids, p_as);
    end if;
    if p_lined or exists (select 1 from {schema}.queues k where k.concurrency is not null) then
        v_woken := v_woken || {schema}.leave_lines(p_ids);
    end if;
    return v_woken || case when v_outer then {schema}.let_in_gathered() else '{}' end;
end
$body$;

-- A job that had ended was queued again by an operator.
create function {schema}.revived(p_id bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_outer constant boolean := {schema}.gather_lines();
    v_line text;
begin
    select j.line into v_line from {schema}.jobs j where j.id = p_id;
    perform {schema}.admit(array[v_line]);
    perform {schema}.reopen(p_id);
    if v_outer then
        perform {schema}.let_in_gathered();
    end if;
end
$body$;
