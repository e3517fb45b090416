"""Give what alerts are made of, and remember who was told up to where."""

from collections.abc import Collection, Sequence

import msgspec

from unstuck.domain.cursor import Cursor
from unstuck.domain.states import WorkerState
from unstuck.store.diagnosis import LOOK_LATE, SWEEP_TICKET
from unstuck.store.postgres import arrays
from unstuck.store.postgres.cursors import cursor_values, newest_cursor_of
from unstuck.store.postgres.diagnosing import DiagnosingVerbs
from unstuck.store.records import (
    AlertEvent,
    AlertPage,
    AlertTarget,
    ConditionChange,
    ConditionLook,
    ConditionRecord,
    LateWorker,
    read_verdict,
)


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

    def events_to_tell(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
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
