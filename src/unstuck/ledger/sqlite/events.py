"""Events, alerts and conditions on SQLite."""

import time
from collections.abc import Collection, Sequence
from typing import assert_never

import apsw
import msgspec

from unstuck.domain.event_cursor import Cursor, stamp_of
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.diagnosis import LOOK_LATE
from unstuck.ledger.contract.events import (
    AlertEvent,
    AlertPage,
    AlertTarget,
    ConditionChange,
    ConditionLook,
    ConditionRecord,
    EventPage,
    EventRecord,
    LateWorker,
)
from unstuck.ledger.contract.workers import read_verdict
from unstuck.ledger.sqlite.clock import Clock, read_clock
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.diagnosis import look_at_queues, look_at_ticket
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.rows import Row


class Events:
    """See `unstuck.ledger.contract.events.Events`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def write(
        self,
        kind: str,
        message: str,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        about: str | None = None,
    ) -> int:
        refuse_nul(kind, message, worker_id or "", about or "")
        with self._db.write() as cursor:
            write_event(cursor, kind, message, job_id=job_id, worker_id=worker_id, about=about)
            return cursor.connection.last_insert_rowid()

    def newest_cursor(self) -> Cursor:
        with self._db.read() as cursor:
            rows = fetch(cursor, "last_events", (1,))
        return Cursor(rows[0][0], rows[0][0], stamp_of(rows[0][1])) if rows else Cursor()

    def since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        records = self.list(job_id=job_id, worker_id=worker_id, after_id=cursor.floor[0], limit=limit)
        # After the events: if retention comes in between, a gap is reported where none is, and never the other way.
        with self._db.read() as reading:
            origin = fetch(reading, "event_time", (cursor.id,))
            [(oldest_id,)] = fetch(reading, "oldest_event")
        is_known = cursor.names(cursor.id, origin[0][0] if origin else None)
        return EventPage(records, frozenset(), is_known, oldest_id)

    def for_alerts(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
        values = (after.floor[0], _json(sorted(kinds)), _json(list(but)), limit)
        with self._db.read() as cursor:
            rows = fetch(cursor, "events_to_tell", values)
            origin = fetch(cursor, "event_time", (after.id,))
        is_known = after.names(after.id, origin[0][0] if origin else None)
        verdicts = [read_verdict(msgspec.json.decode(row[-1])) if row[-1] else None for row in rows]
        events = [AlertEvent(*(*row[:-1], verdict, row[0])) for row, verdict in zip(rows, verdicts, strict=True)]
        return AlertPage(events, is_known)

    def add_alert_target(self, target: str) -> None:
        with self._db.write() as cursor:
            newest = _newest(fetch(cursor, "last_events", (1,)))
            cursor.execute(SQL["add_alert_target"], (target, str(newest)))

    def alert_target(self, target: str) -> AlertTarget | None:
        with self._db.read() as cursor:
            rows = fetch(cursor, "alert_target", (target,))
            newest = _newest(fetch(cursor, "last_events", (1,)))
        return AlertTarget(*(*rows[0], time.time(), newest)) if rows else None

    def save_alert_target(self, target: str, version: int, position: str, state: str) -> bool:
        with self._db.write() as cursor:
            cursor.execute(SQL["save_alert_target"], (target, version, position, state))
            return bool(cursor.connection.changes())

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            fleet = fetch(cursor, "look_fleet")
            able = [row for row in fleet if row[8]]
            checks_s = [float(row[7]) for row in fleet if isinstance(row[7], int | float)]
            return ConditionLook(
                now_at=clock.at,
                queues=look_at_queues(cursor, clock.at),
                living=len(fleet),
                able=len(able),
                # Decoded once for each way of writing them: of a thousand workers most serve the same.
                served=frozenset(queue for text in {row[4] for row in able} for queue in msgspec.json.decode(text)),
                eldest_s=max((clock.at - row[6] for row in fleet), default=None),
                check_interval_s=max(checks_s, default=None),
                late=_late(fleet, clock, late_s),
                unswept_s=look_at_ticket(cursor),
                held=bool(cursor.execute(SQL["look_held"]).get),
            )

    def conditions(self) -> list[ConditionRecord]:
        with self._db.read() as cursor:
            return [ConditionRecord(*row) for row in fetch(cursor, "conditions")]

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        if not changes:
            return 0
        for change in changes:
            refuse_nul(change.about, change.message)
        with self._db.write() as cursor:
            return sum(_change(cursor, change, time.time(), remind_s) for change in changes)

    def list(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        whose: tuple[int | str, ...] = ()
        suffix = ""
        if job_id is not None:
            whose, suffix = (job_id,), "_of_job"
        elif worker_id is not None:
            whose, suffix = (worker_id,), "_of_worker"
        with self._db.read() as cursor:
            if after_id is not None:
                rows = fetch(cursor, f"events{suffix or '_after'}", (*whose, after_id, limit))
            else:
                rows = fetch(cursor, f"last_events{suffix}", (*whose, limit))[::-1]
        records = [_event_record(row) for row in rows]
        both = job_id is not None and worker_id is not None
        return [event for event in records if event.worker_id == worker_id] if both else records


def _change(cursor: apsw.Cursor, change: ConditionChange, now: float, remind_s: float) -> bool:
    which = (change.kind, change.about)
    match change.step:
        case "seen":
            cursor.execute(SQL["see_condition"], (*which, change.message, now))
            return False
        case "begun":
            cursor.execute(SQL["begin_condition"], (*which, change.message, now))
            kind, happened = change.kind, bool(cursor.connection.changes())
        case "lasting":
            cursor.execute(SQL["remind_of_condition"], (*which, change.message, now, now - remind_s))
            kind, happened = f"{change.kind}_still", bool(cursor.connection.changes())
        case "over":
            ended = fetch(cursor, "end_condition", which)
            kind, happened = f"{change.kind}_over", bool(ended) and ended[0][0] is not None
        case _:
            assert_never(change.step)
    if happened:
        write_event(cursor, kind, change.message, worker_id=change.worker_id, about=change.about)
    return happened


def _late(fleet: Sequence[Row], clock: Clock, late_s: float | None) -> tuple[LateWorker, ...]:
    found = []
    for row in fleet:
        silent_s = clock.silent_s(row[9])
        if silent_s >= (row[5] if late_s is None else late_s):
            found.append(LateWorker(row[0], row[1], row[2], WorkerState(row[3]), silent_s))
    return tuple(found[:LOOK_LATE])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _newest(rows: Sequence[Row]) -> Cursor:
    return Cursor(rows[0][0], rows[0][0], stamp_of(rows[0][1])) if rows else Cursor()


def _event_record(row: Row) -> EventRecord:
    # Writes are serial: the order of ids is the order of commits.
    return EventRecord(*(*row, row[0]))
