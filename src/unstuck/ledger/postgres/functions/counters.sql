-- Counters.

-- Add to counters. In the order of the key, so that two who count the same never wait for each other crosswise; each
-- session adds to one of four rows. Nothing is indexed but the key, so an update stays HOT. A process that counts does
-- other things too, and gives up if another session keeps the table.
create or replace function {schema}.count_v1(p_lately integer[], p_names text[], p_labels text[], p_values double precision[])
returns void
language sql volatile
{fixed_path}
set lock_timeout = '500ms'
as $body$
    insert into {schema}.counters as c (minute, name, labels, slot, value)
    select u.lately * floor(extract(epoch from statement_timestamp()) / 60)::bigint, u.name, u.labels,
           pg_backend_pid() % 4, u.value
    from unnest(p_lately, p_names, p_labels, p_values) as u(lately, name, labels, value)
    order by 1, 2, 3
    on conflict (minute, name, labels, slot) do update set value = c.value + excluded.value
$body$;
