"""Events, alerts and conditions on PostgreSQL."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck.domain.event_cursor import Cursor, stamp_of
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.diagnosis import LOOK_LATE, SWEEP_TICKET
from unstuck.ledger.contract.events import (
    AlertEvent,
    AlertPage,
    AlertTarget,
    ConditionChange,
    ConditionLook,
    ConditionRecord,
    JobPosition,
    LateWorker,
)
from unstuck.ledger.contract.workers import read_verdict
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Verbs
from unstuck.ledger.postgres.diagnosis import DiagnosingVerbs


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


class AlertVerbs(DiagnosingVerbs):
    def add_alert_target(self, target: str) -> None:
        # An event that comes in between is told: it is behind the position.
        self.serve("add_alert_target", target=target, position=str(newest_cursor_of(*self.read("newest_event")[0])))

    def alert_target(self, target: str) -> AlertTarget | None:
        rows = self.read("alert_target", target=target)
        return AlertTarget(*(*rows[0][:4], newest_cursor_of(*rows[0][4:]))) if rows else None

    def save_alert_target(self, target: str, version: int, position: str, state: str) -> bool:
        return bool(
            self.serve_once("save_alert_target", target=target, version=version, position=position, state=state)
        )

    def events_for_alerts(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
        rows = self.read(
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

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        [(now_at,)] = self.read("clock")
        ticket = self.read("look_ticket", name=SWEEP_TICKET)
        [(living, able, served, eldest_s, check_interval_s)] = self.read("look_fleet")
        late = self.read("look_late", late_s=late_s, limit=LOOK_LATE)
        return ConditionLook(
            now_at=now_at,
            queues=self.look_at_queues(),
            living=living,
            able=able,
            served=frozenset(served),
            eldest_s=eldest_s,
            check_interval_s=check_interval_s,
            late=tuple(LateWorker(*(*row[:3], WorkerState(row[3]), row[4])) for row in late),
            unswept_s=ticket[0][0] if ticket else None,
            held=self.read("look_held")[0][0],
        )

    def conditions(self) -> list[ConditionRecord]:
        return [ConditionRecord(*row) for row in self.read("conditions")]

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        if not changes:
            return 0
        text = msgspec.json.encode(changes).decode()
        return int(self.serve_once("change_conditions", changes=text, remind_s=remind_s)[0][0])


class TellingVerbs(Verbs):
    def write_event(
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
        connection = self.client_connection if self.worker_id is None else self.service_connection
        return int(connection.write(self.sql["note_event"], values)[0][0])

    def job_position(self, job_ids: Collection[int]) -> list[JobPosition]:
        rows = self.read("glance", ids=list(job_ids)) if job_ids else []
        return [JobPosition(row[0], JobState(row[1]), *row[2:]) for row in rows]

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        pairs = list(wanted)
        # Beside the enqueue, on the lane that whoever enqueues has open.
        values = {"queues": [queue for queue, _ in pairs], "tasks": [task for _, task in pairs]}
        return {(queue, task) for queue, task in self.client_connection.ask(self.sql["unserved"], values)}
