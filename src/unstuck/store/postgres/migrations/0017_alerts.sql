-- Up to where each target of alerts was told.

create table {schema}.alert_targets (
    -- A fingerprint: an address holds secrets.
    target   text primary key,
    event_id bigint not null
) with (fillfactor = 50);
