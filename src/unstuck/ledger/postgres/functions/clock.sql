-- A clock that is set back.

-- Note what the clock says, and give by how much it was set back since the last look. Then retries wait for the rest of
-- their backoff, not until the clock has caught up: those due soonest are moved. Where a caller named the time of a job,
-- it stays. Alerts that last are told on. A job that began in the future of the clock would run past its deadline for
-- as long: its beginning moves with the clock. It is looked for each time, since a lock may have been in the way.
create or replace function {schema}.follow_clock_v1(p_limit integer) returns double precision
language plpgsql volatile
{plain_index_scans}
as $body$
declare
    -- Clocks are corrected by less than that all the time.
    c_step_s constant double precision := 2;
    c_looked_at constant integer := 500;
    v_now constant timestamptz := clock_timestamp();
    v_step_s double precision;
    v_ids bigint[];
begin
    perform set_config('synchronous_commit', 'off', true);
    select extract(epoch from c.at - v_now) into v_step_s from {schema}.clock c for update;
    insert into {schema}.clock as c (at) values (v_now) on conflict (one) do update set at = excluded.at;
    update {schema}.jobs j set
        started_at = least(v_now, j.started_at - make_interval(secs => greatest(v_step_s, 0))),
        claimed_at = least(v_now, j.claimed_at - make_interval(secs => greatest(v_step_s, 0)))
    where j.id in (
        select h.id from {schema}.jobs h
        where h.held and h.started_at > v_now + make_interval(secs => c_step_s)
        limit p_limit for update skip locked);
    if coalesce(v_step_s, 0) < c_step_s then
        -- Retries of attempts that ended later than now: it was set back while no reaper was there to see it. Of those that
        -- wait, the ones due soonest are looked at.
        v_ids := array(
            select w.id
            from (select l.id, l.state, l.attempt from {schema}.jobs l
                  where l.scheduled and l.run_at > v_now order by l.run_at limit c_looked_at) w
            where w.state = 'pending' and w.attempt > 0
              and exists (select from {schema}.attempts a
                          where a.job_id = w.id and a.ended_at > v_now + make_interval(secs => c_step_s)));
        if v_ids = '{}' then
            return 0;
        end if;
        v_ids := array(select w.id from {schema}.jobs w where w.id = any (v_ids) and w.scheduled for update skip locked);
        update {schema}.jobs j set run_at = greatest(v_now, v_now + (j.run_at - e.ended_at))
        from (select a.job_id, max(a.ended_at) as ended_at from {schema}.attempts a
              where a.job_id = any (v_ids) group by a.job_id) e
        where j.id = e.job_id;
        update {schema}.attempts a set ended_at = v_now where a.job_id = any (v_ids) and a.ended_at > v_now;
        return 0;
    end if;
    v_ids := array(
        select w.id from {schema}.jobs w
        where w.scheduled and w.run_at > v_now and w.state = 'pending' and w.attempt > 0
        order by w.run_at limit p_limit for update skip locked);
    update {schema}.jobs j set run_at = greatest(v_now, j.run_at - make_interval(secs => v_step_s))
    where j.id = any (v_ids);
    -- So that no one moves them again.
    update {schema}.attempts a set ended_at = least(v_now, a.ended_at - make_interval(secs => v_step_s))
    where a.job_id = any (v_ids) and a.ended_at > v_now;
    update {schema}.conditions c set
        seen_at = least(c.seen_at, v_now),
        begun_at = case when c.begun_at is not null then least(c.begun_at, v_now) end,
        reminded_at = case when c.reminded_at is not null then least(c.reminded_at, v_now) end
    where greatest(c.seen_at, c.begun_at, c.reminded_at) > v_now;
    return v_step_s;
end
$body$;
