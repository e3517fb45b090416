-- Up to where each target of alerts was told.

CREATE TABLE unstuck_alert_targets (
    -- A fingerprint: an address holds secrets.
    target TEXT PRIMARY KEY,
    event_id INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
