"""Events, alerts and conditions on PostgreSQL."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck.domain.event_cursor import Cursor, stamp_of
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.diagnosis import LOOK_LATE, SWEEP_TICKET
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
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.diagnosis import look_at_queues


def cursor_values(cursor: Cursor) -> dict[str, Any]:
    """Return the parameters of a statement that reads what is behind this position."""
    transaction, event_id = cursor.floor
    return {
        "origin": cursor.id,
        "transaction": str(transaction),
        "id": event_id,
        "open": arrays.texts([str(one) for one in sorted(cursor.open)]),
        "begun": arrays.texts([str(one) for one, _ in cursor.begun]),
        "begun_up_to": arrays.int8s([event_id for _, event_id in cursor.begun]),
    }


def newest_cursor_of(event_id: int | None, transaction: int | None, at: float | None, running: Sequence[int]) -> Cursor:
    """Return the position behind the newest event, of a row of `newest_event`."""
    if event_id is None or transaction is None or at is None:
        return Cursor()
    return Cursor(transaction, event_id, stamp_of(at), frozenset(one for one in running if one < transaction))


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
        values = {"kind": kind, "message": message, "job_id": job_id, "worker_id": worker_id, "about": about}
        # A worker has few connections, and its heartbeat thread must not wait as long as a client does.
        connection = self._db.client_connection if self._db.worker_id is None else self._db.service_connection
        return int(connection.write(self._db.sql["note_event"], values)[0][0])

    def newest_cursor(self) -> Cursor:
        return newest_cursor_of(*self._db.read("newest_event")[0])

    def since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        values = cursor_values(cursor)
        if job_id is None:
            rows = self._db.read("events_since", worker_id=worker_id, limit=limit, **values)
        else:
            rows = self._db.read("events_of_job_since", job_id=job_id, limit=limit, **values)
        running, origin, origin_at, oldest_id = rows[0][:4]
        return EventPage(
            [EventRecord(*row[4:]) for row in rows if row[4] is not None],
            frozenset(running),
            cursor.names(origin, origin_at),
            oldest_id,
        )

    def for_alerts(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
        rows = self._db.read(
            "events_to_tell",
            kinds=arrays.texts(sorted(kinds)),
            but=arrays.int8s(list(but)),
            limit=limit,
            **cursor_values(after),
        )
        origin, origin_at = rows[0][:2]
        found = [row[2:] for row in rows if row[2] is not None]
        events = [AlertEvent(*(*row[:-2], read_verdict(row[-2]), row[-1])) for row in found]
        return AlertPage(events, after.names(origin, origin_at))

    def add_alert_target(self, target: str) -> None:
        # An event that comes in between is told: it is behind the position.
        self._db.serve(
            "add_alert_target", target=target, position=str(newest_cursor_of(*self._db.read("newest_event")[0]))
        )

    def alert_target(self, target: str) -> AlertTarget | None:
        rows = self._db.read("alert_target", target=target)
        return AlertTarget(*(*rows[0][:4], newest_cursor_of(*rows[0][4:]))) if rows else None

    def save_alert_target(self, target: str, version: int, position: str, state: str) -> bool:
        return bool(
            self._db.serve_once("save_alert_target", target=target, version=version, position=position, state=state)
        )

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        [(now_at,)] = self._db.read("clock")
        ticket = self._db.read("look_ticket", name=SWEEP_TICKET)
        [(living, able, served, eldest_s, check_interval_s)] = self._db.read("look_fleet")
        late = self._db.read("look_late", late_s=late_s, limit=LOOK_LATE)
        return ConditionLook(
            now_at=now_at,
            queues=look_at_queues(self._db),
            living=living,
            able=able,
            served=frozenset(served),
            eldest_s=eldest_s,
            check_interval_s=check_interval_s,
            late=tuple(LateWorker(*(*row[:3], WorkerState(row[3]), row[4])) for row in late),
            unswept_s=ticket[0][0] if ticket else None,
            held=self._db.read("look_held")[0][0],
        )

    def conditions(self) -> list[ConditionRecord]:
        return [ConditionRecord(*row) for row in self._db.read("conditions")]

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        if not changes:
            return 0
        text = msgspec.json.encode(changes).decode()
        return int(self._db.serve_once("change_conditions", changes=text, remind_s=remind_s)[0][0])

    def list(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        if after_id is None:
            rows = self._db.read("last_events", job_id=job_id, worker_id=worker_id, limit=limit)[::-1]
        else:
            rows = self._db.read("events_after", job_id=job_id, worker_id=worker_id, after_id=after_id, limit=limit)
        return [EventRecord(*row) for row in rows]
