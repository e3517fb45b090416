-- What was counted, by whom it may: jobs ended, deaths, how long things took. Added to in batches, a few times a minute.

create table {schema}.counters (
    -- Minutes since 1970; 0 holds what was counted since ever.
    minute bigint not null,
    name   text not null,
    labels text not null,
    -- Many add to the same counter at once: each to one of a few rows.
    slot   smallint not null,
    value  double precision not null,
    primary key (minute, name, labels, slot)
) with (fillfactor = 70);
