-- Schedules: what is enqueued again and again, and when next.

CREATE TABLE unstuck_schedules (
    name TEXT PRIMARY KEY,
    source TEXT NOT NULL CHECK (source IN ('app', 'operator')),
    -- Of the whole definition: only who knows it exactly so fires it.
    fingerprint TEXT NOT NULL,
    task TEXT NOT NULL,
    queue TEXT NOT NULL,
    cron TEXT,
    every_s REAL,
    zone TEXT NOT NULL,
    catch_up TEXT NOT NULL CHECK (catch_up IN ('skip', 'latest', 'all')),
    -- The job of each tick, packed.
    job BLOB NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    paused_by TEXT,
    next_at REAL,
    last_at REAL,
    fired_at REAL,
    last_job_id INTEGER,
    -- Grows with every change: whoever fires must have read the last one.
    version INTEGER NOT NULL DEFAULT 1,
    changed_at REAL NOT NULL,
    CHECK ((cron IS NULL) <> (every_s IS NULL))
) STRICT, WITHOUT ROWID;
