-- What was counted, by whom it may: jobs ended, deaths, how long things took. Added to in batches, a few times a minute.

CREATE TABLE unstuck_counters (
    -- Minutes since 1970; 0 holds what was counted since ever.
    minute INTEGER NOT NULL,
    name TEXT NOT NULL,
    labels TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (minute, name, labels)
) STRICT, WITHOUT ROWID;
