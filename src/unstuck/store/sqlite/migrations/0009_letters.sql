-- Where the answers to jobs go that came in through a broker.

CREATE TABLE unstuck_letters (
    job_id INTEGER PRIMARY KEY REFERENCES unstuck_jobs (id) ON DELETE CASCADE,
    -- The identity that the client chose: it must lead to this client alone, also after a restart.
    client BLOB NOT NULL CHECK (length(client) BETWEEN 16 AND 255),
    service TEXT NOT NULL,
    -- Groups the calls of one request.
    request_id TEXT NOT NULL,
    place INTEGER NOT NULL CHECK (place >= 0),
    places INTEGER NOT NULL CHECK (places > place),
    correlation BLOB,
    -- What the client calls this job.
    own_id TEXT,
    -- The client wants to hear of deaths.
    notify INTEGER NOT NULL CHECK (notify IN (0, 1)),
    answered_at REAL
) STRICT;
-- What was answered is not in here, however much there is of it.
CREATE INDEX unstuck_letters_unanswered ON unstuck_letters (client, job_id) WHERE answered_at IS NULL;
