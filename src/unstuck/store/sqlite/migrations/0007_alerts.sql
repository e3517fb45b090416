-- Alerts: up to where each target was told, and which conditions hold.

CREATE TABLE unstuck_alert_targets (
    -- A fingerprint: an address holds secrets.
    target TEXT PRIMARY KEY,
    -- A cursor of the event stream: everything up to it was told, or is not to be told.
    position TEXT NOT NULL,
    -- Raised by every write: who decided on an older one decided on something that is no more.
    version INTEGER NOT NULL DEFAULT 1,
    state TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(state))
) STRICT, WITHOUT ROWID;

CREATE TABLE unstuck_conditions (
    kind TEXT NOT NULL,
    about TEXT NOT NULL,
    message TEXT NOT NULL,
    seen_at REAL NOT NULL,
    -- NULL: seen, but not for long enough to be worth a word.
    begun_at REAL,
    reminded_at REAL,
    PRIMARY KEY (kind, about)
) STRICT, WITHOUT ROWID;

-- What an event is about where it is neither a job nor a worker: a queue, a host.
ALTER TABLE unstuck_events ADD COLUMN about TEXT;

-- Senders look every second. What jobs go through day by day is not in here.
CREATE INDEX unstuck_events_to_tell ON unstuck_events (id) WHERE job_id IS NULL OR kind = 'quarantined';
