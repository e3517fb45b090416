-- Why processes died, how far running jobs say they are, and which jobs must run alone.

-- Deaths that other jobs shared, so that nobody knows who killed the process: above zero the job runs alone.
ALTER TABLE unstuck_jobs ADD COLUMN suspicions INTEGER NOT NULL DEFAULT 0;

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
