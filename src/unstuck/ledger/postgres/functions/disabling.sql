-- Disable workers.

-- Whether a worker or its host is disabled; read with every heartbeat.
create or replace function {schema}.is_disabled_v1(p_worker text) returns boolean
language sql stable
{fixed_path}
as $body$
select coalesce(
    (select w.disabled is not null or h.disabled is not null
     from {schema}.workers w left join {schema}.hosts h on h.name = w.host where w.id = p_worker),
    false)
$body$;

-- Whether some queue would be left without a worker if this worker were disabled.
create or replace function {schema}.unserved_without(p_worker text) returns boolean
language sql volatile
{fixed_path}
as $body$
select exists (
    select 1
    from {schema}.workers w cross join lateral unnest(w.queues) as q(name)
    where w.id = p_worker and w.state in ('active', 'draining', 'suspect')
      and not exists (
          select 1
          from {schema}.workers o
          join {schema}.worker_watch v on v.worker_id = o.id
          left join {schema}.hosts h on h.name = o.host
          where o.id <> w.id
            and o.state = 'active' and o.request is null and o.disabled is null and h.disabled is null
            and v.silent_s < o.suspect_after_s
            and q.name = any (o.queues) and o.tasks @> w.tasks))
$body$;

-- Switch one worker off. A reaper that does it (`p_auto`) asks first whether others are left, and only one session at a time
-- may: if two switch off two workers at once, the second one sees what the first one did. What a reaper switched off is a
-- crash loop, told in the same commit.
create or replace function {schema}.disable_v1(p_worker text, p_reason text, p_by text, p_auto boolean) returns boolean
language plpgsql volatile
{fixed_path}
as $body$
begin
    perform pg_advisory_xact_lock(hashtextextended('{schema}.disable_v1', 0));
    if p_auto and {schema}.unserved_without(p_worker) then
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
