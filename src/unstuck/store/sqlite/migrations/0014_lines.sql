-- What keeps order in queues: lines (how many jobs with the same concurrency key may be at work at once), limits of whole
-- queues, keys that are unique in other ways, expiry, and how long an ended job is kept.

ALTER TABLE unstuck_jobs ADD COLUMN line_limit INTEGER;
-- What its unique key is good for: 'pending' until it is claimed, 'period' for a time (in `unstuck_kept_keys`), NULL until it
-- ends.
ALTER TABLE unstuck_jobs ADD COLUMN unique_for TEXT;

-- Who has a place in a line: let in, and not at the end of an attempt yet. That is the count; there is no other.
CREATE INDEX unstuck_jobs_in_line ON unstuck_jobs (line) WHERE line IS NOT NULL AND (ready = 1 OR held = 1);
CREATE INDEX unstuck_jobs_expiring ON unstuck_jobs (expires_at)
WHERE expires_at IS NOT NULL AND (ready = 1 OR waiting = 1 OR blocked = 1);
CREATE INDEX unstuck_jobs_kept ON unstuck_jobs (keep_s, finished_at) WHERE keep_s IS NOT NULL AND finished_at IS NOT NULL;

-- One row per line that is in use.
CREATE TABLE unstuck_lines (
    key TEXT PRIMARY KEY,
    places INTEGER NOT NULL DEFAULT 1 CHECK (places >= 1),
    -- An operator chose the number; what is enqueued later does not change it.
    pinned_by TEXT,
    changed_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- How many jobs of a queue may be in hand at once, and how many may be begun in a window of time: a bucket of so many
-- tokens, which fills again in that time.
ALTER TABLE unstuck_queues ADD COLUMN concurrency INTEGER CHECK (concurrency >= 1);
ALTER TABLE unstuck_queues ADD COLUMN rate REAL CHECK (rate >= 1);
ALTER TABLE unstuck_queues ADD COLUMN rate_window_s REAL CHECK (rate_window_s > 0);
ALTER TABLE unstuck_queues ADD COLUMN tokens REAL;
ALTER TABLE unstuck_queues ADD COLUMN refilled_at REAL;
-- The operator who chose them; NULL: an app did, or nobody.
ALTER TABLE unstuck_queues ADD COLUMN limited_by TEXT;

-- Keys that are good for a period from their enqueue, however their job ended. A key stays when retention removes its job:
-- the period is a promise of its own, and `job_id` then names a job that is gone.
CREATE TABLE unstuck_kept_keys (
    key TEXT PRIMARY KEY,
    job_id INTEGER NOT NULL,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX unstuck_kept_keys_until ON unstuck_kept_keys (until);

-- By how much the wall clock was ahead of the boot clock when a reaper last looked: less than that, and it was set back.
CREATE TABLE unstuck_clock (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    boot_id TEXT NOT NULL,
    ahead_s REAL NOT NULL
) STRICT;
