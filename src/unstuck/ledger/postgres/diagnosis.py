"""Look at the health of a ledger on PostgreSQL, and ring the bell to hear whether it can be heard."""

import secrets
import statistics
import time
from collections.abc import Iterator
from itertools import groupby

from unstuck.domain.recovery_rules import read_all, rules_of_ledger
from unstuck.domain.watch_clock import Cause
from unstuck.errors import LedgerError
from unstuck.ledger.contract.diagnosis import (
    COUNT_LIMIT,
    LOOK_ERRORS,
    LOOK_GROUPS,
    LOOK_JOBS,
    LOOK_QUEUES,
    SWEEP_TICKET,
    AddressLook,
    Diagnosis,
    JobGroup,
    QueueBacklog,
    RetentionLag,
    Snapshot,
    TableLook,
    TaskBacklog,
    WakeupState,
    WatchLook,
)
from unstuck.ledger.postgres.connect import read_address
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.notifier import PostgresListener

CLOCK_LOOKS = 3
BELL_PATIENCE_S = 3.0
BELL_SLICE_S = 0.2


def diagnose(db: Database, *, far_s: float, late_s: float) -> Diagnosis:
    """Look at the ledger's own health, and try a wake-up."""
    pooled = db.read_connection.open().pooled
    now_at, clock_off_s, round_trip_s = _look_at_clock(db)
    ticket = db.read("look_ticket", name=SWEEP_TICKET)
    reachable, wakeup_note = _try_wakeup(db, pooled)
    limits = {"jobs": LOOK_JOBS, "groups": LOOK_GROUPS}
    quarantined = db.read("look_quarantined", errors=LOOK_ERRORS, groups=LOOK_GROUPS)
    tables = tuple(TableLook(*row) for row in db.read("look_tables", schema=db.schema))
    return Diagnosis(
        database="postgresql",
        now_at=now_at,
        clock_off_s=clock_off_s,
        round_trip_s=round_trip_s,
        queues=look_at_queues(db),
        scheduled=tuple(JobGroup(*row) for row in db.read("look_scheduled", far_s=far_s, **limits)),
        coming=tuple(JobGroup(*row) for row in db.read("look_coming", **limits)),
        overdue=tuple(JobGroup(*row) for row in db.read("look_overdue", late_s=late_s, **limits)),
        quarantined=tuple(JobGroup(*row) for row in quarantined),
        unswept_s=ticket[0][0] if ticket else None,
        overkept=_look_at_retention(db),
        watch=tuple(WatchLook(Cause(row[0]), *row[1:]) for row in db.read("look_watch")),
        several_hosts=tuple(_look_at_addresses(db)),
        pooler=pooled,
        wakeup_reachable=reachable,
        wakeup_note=wakeup_note,
        tables=tables,
        snapshots=tuple(Snapshot(*row) for row in db.read("look_snapshots", groups=LOOK_GROUPS)),
        size_bytes=sum(table.size_bytes for table in tables),
    )


def _look_at_retention(db: Database) -> tuple[RetentionLag, ...]:
    stored = read_all(text for (text,) in db.read("recovery_rules"))
    kept = rules_of_ledger(stored, db.settings.recovery.rules).kept
    rows = db.read("look_retention", jobs_s=kept.jobs_s, events_s=kept.events_s, rows=COUNT_LIMIT, groups=LOOK_GROUPS)
    return tuple(RetentionLag(*row) for row in rows)


def _look_at_addresses(db: Database) -> Iterator[AddressLook]:
    addresses = {"url": db.address}
    if db.settings.listen_url:
        addresses["listen_url"] = read_address(db.settings.listen_url)
    for setting, address in addresses.items():
        hosts = address.hosts()
        if len(hosts) > 1:
            user, database = (str(address.parameters.get(name) or "") for name in ("user", "dbname"))
            yield AddressLook(setting, hosts, user, database or user, address.chosen())


def _look_at_clock(db: Database) -> tuple[float, float, float]:
    """Give the server's time, how far ours is ahead of it at least, and the usual round trip."""
    looks = []
    for _ in range(CLOCK_LOOKS):
        before_at, started_s = time.time(), time.monotonic()
        [(now_at,)] = db.read("clock")
        looks.append((time.monotonic() - started_s, before_at, now_at, time.time()))
    # The quickest answer says the most: the server looked at its clock somewhere between our two looks at ours.
    _, before_at, now_at, after_at = min(looks)
    off_s = 0.0
    if not before_at <= now_at <= after_at:
        off_s = before_at - now_at if now_at < before_at else after_at - now_at
    return now_at, off_s, statistics.median(took_s for took_s, *_ in looks)


def look_at_queues(db: Database) -> tuple[QueueBacklog, ...]:
    rows = db.read("look_ready", queues=LOOK_QUEUES, count=COUNT_LIMIT, jobs=LOOK_JOBS)
    found = [
        QueueBacklog(name, paused, ready, tuple(TaskBacklog(*row[3:]) for row in tasks))
        for (name, paused, ready), tasks in groupby(rows, key=lambda row: row[:3])
    ]
    known = {queue.name for queue in found}
    paused_names = [name for (name,) in db.read("look_paused", queues=LOOK_QUEUES) if name not in known]
    return (*found, *(QueueBacklog(name, True, 0) for name in paused_names))


def _try_wakeup(db: Database, pooled: bool) -> tuple[WakeupState, str]:
    """Listen on a connection of the kind that workers listen on, ring the way everybody rings, and wait."""
    if not db.settings.notify:
        return "off", ""
    if pooled and not db.settings.listen_url:
        return "pooled", ""
    connection = db.new_connection("doctor", db.settings.listen_url)
    # A channel of its own: nobody is woken for a rehearsal.
    channel = f"{db.schema}.doctor"
    word = f"doctor:{secrets.token_hex(8)}"
    listener = PostgresListener(connection, channel, lambda heard: heard == word)
    try:
        if connection.open().pooled:
            return "silent", "listen_url leads to a pooler too"
        deadline_s = time.monotonic() + BELL_PATIENCE_S
        while time.monotonic() < deadline_s:
            db.read_connection.ask(db.sql["ring"], {"channel": channel, "payload": word})
            if listener.wait(BELL_SLICE_S):
                return "works", ""
        return "silent", f"a NOTIFY was not heard within {BELL_PATIENCE_S:g}s"
    except LedgerError as error:
        return "silent", str(error)
    finally:
        listener.close()
        connection.close()
