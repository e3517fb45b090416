-- Who may come in through the web door, and what operators did, through whichever door.

create table {schema}.api_tokens (
    id         text primary key,
    name       text not null,
    -- The token itself is shown once and kept nowhere.
    hash       bytea not null unique,
    -- Signs logins; whoever reads this table still lacks what only the token's holder can derive.
    seal       bytea not null,
    scopes     text[] not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    expires_at timestamptz,
    revoked_at timestamptz
);

create table {schema}.audit (
    id      bigint generated always as identity primary key,
    at      timestamptz not null default clock_timestamp(),
    by      text not null,
    door    text not null,
    verb    text not null,
    target  text not null,
    -- NULL: it was begun, and nobody knows how it ended.
    outcome text
);
