-- The watch over the workers: the periods in which a reaper kept reaching the ledger.

-- How much of the time after this was watched: time in which no worker could write does not age a lease.
create or replace function {schema}.watched_s(p_since timestamptz) returns double precision
language sql stable
{fixed_path}
as $body$
    select coalesce(sum(extract(epoch from p.until - greatest(p.since, p_since))), 0)::double precision
    from {schema}.watch_periods p where p.until > p_since
$body$;

-- Extend the watch over the workers to now, or begin a new watch period. The rule is `advance` of domain/watch.py. The row
-- of `ledger` serialises ticks and is never waited for: the session that has it keeps the watch for all.
create or replace function {schema}.tick_v1(
    p_claim_s double precision, p_every_s double precision, p_slack_s double precision, p_cause text,
    p_ticket text, p_ttl_s double precision,
    p_since_s double precision default null, p_seen_at double precision default null)
returns table (
    won boolean, stale_s double precision, watched_s double precision, began text, gap_s double precision,
    set_back_s double precision, at double precision)
language plpgsql volatile
{index_scans}
set jit = off
as $body$
#variable_conflict use_column
declare
    c_step_back constant interval := '0.1 seconds';
    c_fresh_intervals constant double precision := 2;
    c_fresh_s constant double precision := 1;
    -- A reaper that just started vouches for nothing, so it leaves the watch to others a little longer.
    v_fresh_s double precision := greatest(c_fresh_intervals * p_every_s, case when p_claim_s is null then c_fresh_s end);
    c_max_periods constant bigint := 200;
    c_most_periods constant bigint := 2000;
    v_now timestamptz := clock_timestamp();
    v_server text := {schema}.incarnation();
    v_known text;
    v_counted bigint;
    v_terminated bigint;
    v_run_out boolean;
    v_last {schema}.watch_periods;
    v_stale_s double precision;
    v_step interval;
    -- The ledger's clock went further than the reaper's own since their last contact.
    v_overtaken boolean;
begin
    won := p_ticket is null;
    if p_ticket is not null then
        insert into {schema}.tickets as t (name, until) values (p_ticket, v_now + make_interval(secs => p_ttl_s))
        on conflict (name) do update set until = excluded.until
        where t.until <= v_now or t.until > v_now + make_interval(secs => 2 * p_ttl_s)
        returning true into won;
        won := coalesce(won, false);
    end if;
    set_back_s := 0;
    select p.* into v_last from {schema}.watch_periods p order by p.id desc limit 1;
    v_stale_s := extract(epoch from v_now - v_last.until);
    at := extract(epoch from v_now);
    v_overtaken := coalesce(at - p_seen_at > p_since_s + p_slack_s, false);
    if not won and v_stale_s >= 0 and v_stale_s <= p_every_s then
        -- Others keep the watch, and most ask in vain.
        stale_s := case when v_overtaken then 0 else v_stale_s end;
        watched_s := extract(epoch from v_last.until - v_last.since);
        return next;
        return;
    end if;

    select l.server, l.sessions_terminated into v_known, v_counted
    from {schema}.ledger l for no key update skip locked;
    if not found then
        -- Whoever has the row may fail to commit, so no one takes its word for time that was not watched.
        stale_s := case when v_overtaken then 0
                        when v_stale_s <= p_claim_s + p_slack_s or p_claim_s is null and v_stale_s <= v_fresh_s
                        then greatest(0, v_stale_s) else 0 end;
        watched_s := coalesce(extract(epoch from v_last.until - v_last.since), 0);
        return next;
        return;
    end if;
    -- Read again behind the lock: somebody may have begun a period meanwhile.
    select p.* into v_last from {schema}.watch_periods p order by p.id desc limit 1;
    v_now := clock_timestamp();
    v_stale_s := extract(epoch from v_now - v_last.until);
    at := extract(epoch from v_now);
    if p_claim_s is not null and at - p_seen_at > p_since_s + p_slack_s then
        p_claim_s := 0;
    end if;
    perform set_config('synchronous_commit', 'off', true);
    if v_known is distinct from v_server then
        update {schema}.ledger set server = v_server where one;
        perform {schema}.skip_lost_numbers_v1();
    end if;

    if v_last.id is null then
        began := coalesce(p_cause, 'start');
    elsif v_now < v_last.until - c_step_back then
        -- All periods move with the clock, and so do all heartbeats of the living, none of which is stored as older than the
        -- last tick. If only those in the future moved, they would lie among older ones, and the same moments would count
        -- twice.
        set_back_s := -v_stale_s;
        v_step := make_interval(secs => set_back_s);
        update {schema}.watch_periods p set
            since = p.since - v_step, until = p.until - v_step, set_back_at = p.set_back_at - v_step;
        update {schema}.watch_periods p set set_back_s = -v_stale_s, set_back_at = v_now where p.id = v_last.id;
        update {schema}.worker_heartbeats b set beat_at = least(b.beat_at - v_step, v_now)
        where b.beat_at > v_now or exists (
            select 1 from {schema}.workers w where w.id = b.worker_id and w.state in ('active', 'draining', 'suspect'));
        update {schema}.ledger l set sessions_doubted_at = least(l.sessions_doubted_at - v_step, v_now)
        where l.sessions_doubted_at is not null;
        v_last.since := v_last.since - v_step;
        v_last.until := v_now;
        -- If more happened than that, no one knows how long it took.
        began := case when v_known <> v_server then 'failover' else p_cause end;
    elsif v_known is not null and v_known <> v_server then
        began := 'failover';
    elsif v_stale_s <= p_claim_s + p_slack_s then
        update {schema}.watch_periods p set until = greatest(p.until, v_now) where p.id = v_last.id;
    elsif v_stale_s <= v_fresh_s then
        -- A tick that was late vouches for none of the time before it, now or with its next one.
        stale_s := case when p_claim_s is null then v_stale_s else 0 end;
        watched_s := extract(epoch from v_last.until - v_last.since);
    elsif p_claim_s is null then
        began := coalesce(p_cause, 'start');
    else
        began := coalesce(p_cause, 'clock');
    end if;
    if began is not null then
        -- A claim reaches back only as far as the server and its clock did: it knows nothing of another one's time. And it
        -- was made when the tick was sent, which may have been on its way for all of the time that no one watched.
        v_last.since := v_now - make_interval(
            secs => case when began in ('failover', 'clock') or set_back_s > 0 then 0 else coalesce(p_claim_s, 0) end);
        gap_s := extract(epoch from v_last.since - v_last.until);
        insert into {schema}.watch_periods (since, until, cause, gap_s) values (v_last.since, v_now, began, gap_s);
        -- Those in which a living worker was silent count against it, so they stay.
        delete from {schema}.watch_periods p
        where p.id <= (select max(m.id) from {schema}.watch_periods m) - c_max_periods
          and (p.id <= (select max(m.id) from {schema}.watch_periods m) - c_most_periods
               or not exists (select 1 from {schema}.workers w join {schema}.worker_heartbeats b on b.worker_id = w.id
                              where w.state in ('active', 'draining', 'suspect') and b.beat_at < p.until));
    end if;
    if began is not null and set_back_s = 0 then
        -- The clock may have been ahead for a while that no reaper saw. Heartbeats of this moment are no sign of that.
        update {schema}.worker_heartbeats b set beat_at = v_now where b.beat_at > v_now + interval '1 second';
        update {schema}.ledger l set sessions_doubted_at = v_now where l.sessions_doubted_at > v_now;
    end if;
    -- A session may be missing though its worker lives: someone terminated sessions at the server since the last tick, or a
    -- worker that lost its own finds no free connection. The count outlasts any time in which no one looked. The first tick
    -- has nothing to compare it with.
    v_terminated := {schema}.sessions_terminated();
    v_run_out := {schema}.connections_run_out();
    if v_run_out or v_counted is distinct from v_terminated then
        update {schema}.ledger l set
            sessions_terminated = v_terminated,
            sessions_doubted_at = case when v_run_out or v_counted is not null then clock_timestamp() end
        where l.one;
    end if;
    stale_s := coalesce(stale_s, 0);
    watched_s := coalesce(watched_s, extract(epoch from v_now - v_last.since));
    return next;
end
$body$;
