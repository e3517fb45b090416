-- Requests that must not be done twice: what was enqueued under an idempotency key, also after those jobs ended.

CREATE TABLE unstuck_requests (
    -- A hash of who asked and of their key: of one length whatever they chose, and nobody meets another's.
    key BLOB PRIMARY KEY,
    -- A hash of what was asked for: the same key with something else is a mistake, and is told.
    fingerprint BLOB NOT NULL,
    at REAL NOT NULL,
    -- [[job id, fresh], …]
    stored TEXT NOT NULL CHECK (json_valid(stored))
) STRICT, WITHOUT ROWID;
CREATE INDEX unstuck_requests_by_age ON unstuck_requests (at);
