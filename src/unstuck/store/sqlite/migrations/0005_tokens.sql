-- Who may come in through the web door, and what operators did, through whichever door.

CREATE TABLE unstuck_api_tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    -- The token itself is shown once and kept nowhere.
    hash BLOB NOT NULL UNIQUE,
    -- Signs logins; whoever reads this table still lacks what only the token's holder can derive.
    seal BLOB NOT NULL,
    scopes TEXT NOT NULL CHECK (json_valid(scopes)),
    created_at REAL NOT NULL,
    created_by TEXT NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    door TEXT NOT NULL,
    verb TEXT NOT NULL,
    target TEXT NOT NULL,
    -- NULL: it was begun, and nobody knows how it ended.
    outcome TEXT
) STRICT;
