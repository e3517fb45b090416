-- Why processes died, how far running jobs say they are, and which jobs must run alone.

-- Deaths that other jobs shared, so that nobody knows whose doing they were: free, but not for ever.
ALTER TABLE unstuck_jobs ADD COLUMN suspicions INTEGER NOT NULL DEFAULT 0;
-- It may have killed a process that it shared with others: it gets one of its own.
ALTER TABLE unstuck_jobs ADD COLUMN alone INTEGER NOT NULL DEFAULT 0 CHECK (alone IN (0, 1));

-- One per attempt that died or had to be ended, as JSON: it is read by people, and no rule decides by it.
CREATE TABLE unstuck_autopsies (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    body TEXT NOT NULL CHECK (json_valid(body)),
    PRIMARY KEY (job_id, token)
) STRICT;

-- One row per job that ever said how far it is, or whose interpreter fell silent; updated in place.
CREATE TABLE unstuck_progress (
    job_id INTEGER PRIMARY KEY REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    token INTEGER NOT NULL,
    at REAL NOT NULL,
    done REAL,
    total REAL,
    message TEXT NOT NULL,
    -- Since when no Python code ran in its process; NULL while it does.
    busy_since REAL
) STRICT;
