-- Verdicts on workers that give no sign of life, and the ends of what they held.

-- Whether the evidence still holds, with the identity row locked against turns, beats and other verdicts. Waits a
-- moment only: a turn in flight is short, and a reaper that cannot get the lock now comes again.
create or replace function {schema}.guard_holds(p_worker text, p_guard text, p_silent_s double precision) returns boolean
language plpgsql volatile
{fixed_path}
set lock_timeout = '1s'
as $body$
declare
    v_state text;
begin
    select w.state into v_state from {schema}.workers w where w.id = p_worker for no key update;
    -- A worker of whom nothing is left is as dead as can be.
    v_state := coalesce(v_state, 'dead');
    return case p_guard
        when 'none' then true
        when 'dead' then v_state in ('dead', 'stopped')
        when 'suspect' then v_state = 'suspect'
        when 'silent' then coalesce((select v.counted_s >= p_silent_s from {schema}.worker_watch v where v.worker_id = p_worker), true)
        when 'unheard' then coalesce((select v.silent_s >= p_silent_s from {schema}.worker_watch v where v.worker_id = p_worker), true)
        else false
    end;
exception when lock_not_available then
    return false;
end
$body$;

-- Write SUSPECT or DEAD, if the guard still holds.
create or replace function {schema}.condemn_v1(
    p_worker text, p_verdict jsonb, p_guard text, p_silent_s double precision, p_message text)
returns boolean
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_now timestamptz;
    v_state text := p_verdict ->> 'state';
begin
    if v_state not in ('suspect', 'dead') or not {schema}.guard_holds(p_worker, p_guard, p_silent_s) then
        return false;
    end if;
    v_now := clock_timestamp();
    update {schema}.workers w set
        state = v_state,
        verdict = p_verdict,
        suspect_at = case when v_state = 'suspect' then v_now end,
        stopped_at = case when v_state = 'dead' then v_now end
    where w.id = p_worker
      and (w.state in ('active', 'draining') or (w.state = 'suspect' and v_state = 'dead'));
    if not found then
        return false;
    end if;
    insert into {schema}.events (at, kind, worker_id, message) values (v_now, 'worker_' || v_state, p_worker, p_message);
    return true;
end
$body$;

-- End attempts of another worker, if the guard still holds; gives what was written, and the queues (without a job) in which
-- others became ready by it.
create or replace function {schema}.settle_v1(
    p_worker text, p_endings jsonb, p_releases jsonb, p_guard text, p_silent_s double precision)
returns table (job_id bigint, token bigint, woken text)
language plpgsql volatile
{fixed_path}
set lock_timeout = '400ms'
as $body$
#variable_conflict use_column
declare
    v_part jsonb;
    v_ids bigint[];
    v_tokens bigint[];
    v_as text[];
    v_linked bigint[] := '{}';
    v_linked_as text[] := '{}';
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
        select array_agg(e.job_id), array_agg(e.token), v_linked || array_agg(e.job_id) filter (where e.linked_as is not null),
               v_linked_as || array_agg(e.linked_as) filter (where e.linked_as is not null)
        into v_ids, v_tokens, v_linked, v_linked_as
        from {schema}.apply_endings(p_worker, v_part, false) e where e.written;
        return query select u.id, u.token, null::text from unnest(v_ids, v_tokens) as u(id, token);
    end loop;
    return query
    select null::bigint, null::bigint, w.queue from unnest({schema}.settled(v_linked, v_linked_as)) as w(queue) group by w.queue;
end
$body$;
