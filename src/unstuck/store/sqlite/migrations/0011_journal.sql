-- What jobs wrote down on their way, and the signals that were sent to them.

CREATE TABLE unstuck_journal (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    -- Its place, from 1; 0 is the one that is written over.
    seq INTEGER NOT NULL CHECK (seq >= 0),
    kind TEXT NOT NULL CHECK (kind IN ('step', 'sleep', 'wait', 'signal', 'timeout', 'checkpoint')),
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    at REAL NOT NULL,
    -- The attempt that wrote it.
    token INTEGER NOT NULL,
    PRIMARY KEY (job_id, seq),
    CHECK ((seq = 0) = (kind = 'checkpoint'))
) STRICT;

CREATE INDEX unstuck_jobs_suspended ON unstuck_jobs (queue, waiting) WHERE state = 'waiting';

CREATE TABLE unstuck_signals (
    job_id INTEGER NOT NULL REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    at REAL NOT NULL,
    sent_by TEXT NOT NULL,
    -- The entry by which the job took it; NULL while it is kept.
    taken_seq INTEGER,
    PRIMARY KEY (job_id, number)
) STRICT;
