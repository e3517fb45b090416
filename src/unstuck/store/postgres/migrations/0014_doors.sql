-- Workers that come through another door than Python's own: over HTTP or ZeroMQ, in any language.

alter table {schema}.workers
    add column door text not null default 'python' constraint door_known check (door in ('python', 'http', 'mdp')),
    -- The token that it came with: nobody else may speak for it.
    add column owner text;
create index workers_by_name on {schema}.workers (name) where door <> 'python';
