-- Workers and hosts that are switched off, and why.

-- JSON: reason, by, at, auto. NULL: it works.
ALTER TABLE unstuck_workers ADD COLUMN disabled TEXT CHECK (disabled IS NULL OR json_valid(disabled));

-- Only hosts of which something was decided. A worker that is born on a disabled one takes nothing either.
CREATE TABLE unstuck_hosts (
    name TEXT PRIMARY KEY,
    disabled TEXT CHECK (disabled IS NULL OR json_valid(disabled)),
    -- Deaths before this are forgiven.
    enabled_at REAL
) STRICT, WITHOUT ROWID;
