-- Alerts: up to where each target was told, and which conditions hold.

create table {schema}.alert_targets (
    -- A fingerprint: an address holds secrets.
    target   text primary key,
    -- A cursor of the event stream: everything up to it was told, or is not to be told.
    position text not null,
    -- Raised by every write: who decided on an older one decided on something that is no more.
    version  bigint not null default 1,
    state    text not null default '{}'
) with (fillfactor = 50);

create table {schema}.conditions (
    kind        text not null,
    about       text not null,
    message     text not null,
    seen_at     timestamptz not null default clock_timestamp(),
    -- NULL: seen, but not for long enough to be worth a word.
    begun_at    timestamptz,
    reminded_at timestamptz,
    primary key (kind, about)
) with (fillfactor = 70);

-- What an event is about where it is neither a job nor a worker: a queue, a host.
alter table {schema}.events add column about text;

-- Senders look every second. What jobs go through day by day is not in here.
create index events_to_tell on {schema}.events (id) where job_id is null or kind = 'quarantined';

-- Conditions begin, last and end, each with one event, whoever and however many look at the same time.
create function {schema}.change_conditions_v1(p_changes jsonb, p_remind_s double precision) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
declare
    v_change record;
    v_kind   text;
    v_count  integer := 0;
begin
    -- In one order for everybody: two who look at once must not wait for each other.
    for v_change in
        select c.step, c.kind, c.about, c.message, c.worker_id
        from jsonb_to_recordset(p_changes) as c(step text, kind text, about text, message text, worker_id text)
        order by c.kind, c.about
    loop
        v_kind := null;
        if v_change.step = 'seen' then
            insert into {schema}.conditions (kind, about, message)
            values (v_change.kind, v_change.about, v_change.message)
            on conflict (kind, about) do nothing;
        elsif v_change.step = 'begun' then
            insert into {schema}.conditions as c (kind, about, message, begun_at, reminded_at)
            values (v_change.kind, v_change.about, v_change.message, clock_timestamp(), clock_timestamp())
            on conflict (kind, about) do update set
                message = excluded.message, begun_at = excluded.begun_at, reminded_at = excluded.reminded_at
            where c.begun_at is null;
            if found then
                v_kind := v_change.kind;
            end if;
        elsif v_change.step = 'lasting' then
            update {schema}.conditions c set message = v_change.message, reminded_at = clock_timestamp()
            where c.kind = v_change.kind and c.about = v_change.about
              and c.reminded_at <= clock_timestamp() - make_interval(secs => p_remind_s);
            if found then
                v_kind := v_change.kind || '_still';
            end if;
        else
            delete from {schema}.conditions c
            where c.kind = v_change.kind and c.about = v_change.about
            returning case when c.begun_at is not null then c.kind || '_over' end into v_kind;
        end if;
        if v_kind is not null then
            insert into {schema}.events (kind, worker_id, about, message)
            values (v_kind, v_change.worker_id, v_change.about, v_change.message);
            v_count := v_count + 1;
        end if;
    end loop;
    return v_count;
end
$body$;

-- As before, and what was switched off by itself is a crash loop, told in the same commit.
create or replace function {schema}.disable_v1(p_worker text, p_reason text, p_by text, p_auto boolean) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    perform pg_advisory_xact_lock(hashtextextended('{schema}.disable_v1', 0));
    if p_auto and {schema}.unserved_without(p_worker, null) then
        return false;
    end if;
    update {schema}.workers w set
        disabled = jsonb_build_object('reason', p_reason, 'by', p_by, 'auto', p_auto,
                                      'at', extract(epoch from clock_timestamp())::double precision)
    where w.id = p_worker and w.state in ('active', 'draining', 'suspect')
      -- What a person says stands above what was done by itself, which the reaper may take back.
      and (w.disabled is null or not p_auto and (w.disabled ->> 'auto')::boolean);
    if not found then
        return false;
    end if;
    insert into {schema}.events (kind, worker_id, message)
    values ('worker_disabled', p_worker, format('Disabled by %s: %s', p_by, p_reason));
    if p_auto then
        insert into {schema}.events (kind, worker_id, message)
        values ('crash_loop', p_worker, format('Worker %s was disabled: %s', p_worker, p_reason));
    end if;
    return true;
end
$body$;

create or replace function {schema}.disable_host_v1(p_host text, p_reason text, p_by text, p_auto boolean) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $body$
begin
    perform pg_advisory_xact_lock(hashtextextended('{schema}.disable_v1', 0));
    if p_auto and {schema}.unserved_without(null, p_host) then
        return false;
    end if;
    insert into {schema}.hosts as h (name, disabled)
    values (p_host, jsonb_build_object('reason', p_reason, 'by', p_by, 'auto', p_auto,
                                       'at', extract(epoch from clock_timestamp())::double precision))
    on conflict (name) do update set disabled = excluded.disabled
        where h.disabled is null or not p_auto and (h.disabled ->> 'auto')::boolean;
    if not found then
        return false;
    end if;
    insert into {schema}.events (kind, message)
    values ('host_disabled', format('Host %L was disabled by %s: %s', p_host, p_by, p_reason));
    if p_auto then
        insert into {schema}.events (kind, about, message)
        values ('crash_loop', p_host, format('Host %L was disabled: %s', p_host, p_reason));
    end if;
    return true;
end
$body$;
