-- Claim from queues that have a limit: how many of their jobs may be held at once, and how many may begin in a time.

-- How many more jobs of a queue may be taken now, and where its rate is why not, when there will be one.
create or replace function {schema}.room_of_v1(p_queue text, out room bigint, out in_s double precision)
language plpgsql stable
{index_scans}
as $body$
declare
    v_queue record;
    v_tokens double precision;
begin
    select k.concurrency, k.rate, k.rate_window_s, k.tokens, k.refilled_at into v_queue
    from {schema}.queues k where k.name = p_queue;
    room := 2147483647;
    if v_queue.concurrency is not null then
        room := greatest(0, v_queue.concurrency - (select count(*) from {schema}.jobs j where j.held and j.queue = p_queue));
    end if;
    if v_queue.rate is not null then
        v_tokens := least(v_queue.rate, coalesce(
            v_queue.tokens + greatest(0, date_part('epoch', clock_timestamp() - v_queue.refilled_at))
                * v_queue.rate / v_queue.rate_window_s, v_queue.rate));
        if v_tokens < 1 and room > 0 then
            in_s := (1 - v_tokens) * v_queue.rate_window_s / v_queue.rate;
        end if;
        room := least(room, floor(v_tokens)::bigint);
    end if;
end
$body$;

-- Whether the bucket of a queue was last filled in the future: the clock was set back. The next turn that may write sets the
-- bucket's time to now. Time before the step counts as none, or the queue would stand still until the clock catches up.
create or replace function {schema}.filled_in_future(p_queue text) returns boolean
language sql stable
{fixed_path}
as $body$
    select exists (
        select 1 from {schema}.queues k where k.name = p_queue and k.rate is not null and k.refilled_at > clock_timestamp())
$body$;

create or replace function {schema}.any_ready_within(p_queues text[], p_tasks text[]) returns boolean
language plpgsql stable
{fixed_path}
as $body$
declare
    v_queue text;
begin
    foreach v_queue in array p_queues loop
        if {schema}.any_ready(array[v_queue], p_tasks)
           and ((select r.room from {schema}.room_of_v1(v_queue) r) > 0 or {schema}.filled_in_future(v_queue)) then
            return true;
        end if;
    end loop;
    return false;
end
$body$;

-- When one of these queues, which has something ready, may give it by its rate; NULL where it is not time that is missing.
create or replace function {schema}.room_in_s(p_queues text[], p_tasks text[]) returns double precision
language plpgsql stable
{fixed_path}
as $body$
begin
    return (
        select min(r.in_s) from unnest(p_queues) as q(name) cross join lateral {schema}.room_of_v1(q.name) r
        where r.in_s is not null and {schema}.any_ready(array[q.name], p_tasks));
end
$body$;

-- Lock the row of a queue, and return whether that was possible: a session that holds it for longer than other claims do is
-- not waited for.
create or replace function {schema}.lock_queue(p_queue text) returns boolean
language plpgsql volatile
{index_scans}
set lock_timeout = '200ms'
as $body$
begin
    perform 1 from {schema}.queues k where k.name = p_queue for update skip locked;
    if found then
        return true;
    end if;
    begin
        perform 1 from {schema}.queues k where k.name = p_queue for update;
        return true;
    exception when lock_not_available then
        return false;
    end;
end
$body$;

-- As `lock_ready`, from queues that have a limit, each under the lock of its row: who counts what is held there counts
-- what the last one took. `p_ids` was found in other queues; given back are the best of both.
create or replace function {schema}.lock_ready_within(
    p_queues text[], p_tasks text[], p_limit integer, p_ids bigint[], p_bytes bigint,
    out ids bigint[], out payload_bytes bigint, out was_cut boolean)
language plpgsql volatile
{fixed_path}
as $body$
declare
    v_queue text;
    v_room bigint;
    v_ids bigint[];
    v_bytes bigint;
    v_limited text[] := '{}';
begin
    ids := p_ids;
    payload_bytes := 0;
    foreach v_queue in array p_queues loop
        -- Without a lock first: who finds nothing must not wait for those who do.
        continue when not {schema}.any_ready(array[v_queue], p_tasks)
            or (select r.room from {schema}.room_of_v1(v_queue) r) <= 0 and not {schema}.filled_in_future(v_queue);
        continue when not {schema}.lock_queue(v_queue);
        update {schema}.queues k set refilled_at = clock_timestamp()
        where k.name = v_queue and k.rate is not null and k.refilled_at > clock_timestamp();
        select r.room into v_room from {schema}.room_of_v1(v_queue) r;
        continue when v_room <= 0;
        select r.ids, r.payload_bytes into v_ids, v_bytes
        from {schema}.lock_ready(v_queue, p_tasks, least(v_room, p_limit)::integer) r;
        continue when v_ids is null;
        ids := ids || v_ids;
        payload_bytes := payload_bytes + coalesce(v_bytes, 0);
        v_limited := v_limited || v_queue;
    end loop;
    if cardinality(v_limited) = 0 then
        return;
    end if;
    select array_agg(x.id order by x.rank, x.id) into ids from (
        select j.id, j.rank from {schema}.jobs j where j.id = any (ids) order by j.rank, j.id limit p_limit) x;
    if payload_bytes > p_bytes and cardinality(ids) > 1 then
        was_cut := true;
        ids := {schema}.first_within_bytes(ids, p_bytes);
    end if;
    update {schema}.queues k set
        tokens = least(k.rate, coalesce(
            k.tokens + greatest(0, date_part('epoch', clock_timestamp() - k.refilled_at)) * k.rate / k.rate_window_s, k.rate))
            - (select count(*) from {schema}.jobs j where j.id = any (ids) and j.queue = k.name),
        refilled_at = clock_timestamp()
    where k.name = any (v_limited) and k.rate is not null;
end
$body$;
