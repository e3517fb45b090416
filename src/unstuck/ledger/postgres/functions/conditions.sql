-- Conditions that alerts tell of.

-- Conditions begin, last and end, each with one event, however many processes look at the same time.
create or replace function {schema}.change_conditions_v1(p_changes jsonb, p_remind_s double precision) returns integer
language plpgsql volatile
{fixed_path}
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
