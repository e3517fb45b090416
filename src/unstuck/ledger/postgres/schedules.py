"""Keep schedules: their definitions, and exactly one enqueue per tick."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unstuck import failpoints
from unstuck.domain.schedules import (
    CLOCK_SET_BACK_S,
    INTERVAL_SET_BACK_S,
    INTERVALS_SET_BACK,
    ScheduleDefinition,
    Source,
    Timing,
)
from unstuck.ledger.checks import check_jobs
from unstuck.ledger.contract.schedules import FIRE_WAIT_S, DueSchedules, Firing, ScheduleRecord
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.enqueue import columns
from unstuck.ledger.postgres.locks import past_locks

DUE_AT_ONCE = 100


class Schedules:
    """See `unstuck.ledger.contract.schedules.Schedules`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def know(self, definitions: Sequence[ScheduleDefinition], source: Source) -> list[str]:
        changed: list[str] = []
        # In the order of names, each by itself: what is written twice is the same.
        for one in sorted(definitions, key=lambda definition: definition.name):
            rows = self._db.service_connection.write(
                self._db.sql["know_schedule"], {**_definition(one), "source": source}
            )
            changed += [row[0] for row in rows]
        return changed

    def differing(self, known: Mapping[str, str]) -> list[tuple[ScheduleRecord, bool]]:
        # On the service lane, as the others that the clock of schedules needs: a worker shall need no more connections.
        rows = self._db.serve(
            "differing_schedules", names=arrays.texts(list(known)), fingerprints=arrays.texts(list(known.values()))
        )
        return [(_record(row[:-1]), row[-1]) for row in rows]

    def restore(self, definition: ScheduleDefinition, replaces: str, message: str) -> bool:
        values = {**_definition(definition), "replaces": replaces, "message": message}
        return bool(self._db.service_connection.write(self._db.sql["restore_schedule"], values))

    def due(self, fingerprints: Collection[str], after: Sequence[str] = ()) -> DueSchedules:
        known = arrays.texts(sorted(fingerprints))
        first, *due = self._db.serve(
            "due_schedules",
            fingerprints=known,
            ahead_s=CLOCK_SET_BACK_S,
            interval_ahead_s=INTERVAL_SET_BACK_S,
            intervals_ahead=INTERVALS_SET_BACK,
            limit=DUE_AT_ONCE,
            after=arrays.texts(list(after)),
        )
        next_at, now = first[12:14]
        next_in_s = None if next_at is None else next_at - now
        return DueSchedules(now, tuple(_record(row) for row in due), next_in_s, len(due) < DUE_AT_ONCE)

    def fire(self, firing: Firing, wait_s: float = FIRE_WAIT_S) -> list[int] | None:
        check_jobs(firing.jobs)
        count = len(firing.jobs)
        if failpoints.active and count:
            failpoints.reached("schedule.before_commit")
        values = {
            "name": firing.name,
            "version": firing.version,
            "next_at": firing.next_at,
            "last_at": firing.last_at,
            "event": firing.event,
            "message": firing.message,
            "count": count,
            "wait_ms": str(max(1, round(wait_s * 1000))),
            **_columns(firing),
        }
        # Tried once: whoever keeps time has other schedules to fire, and comes back.
        rows = past_locks(
            self._db,
            self._db.service_connection,
            lambda: self._db.serve_once("fire_schedule", **values),
            patience_s=0.0,
        )
        ids: list[int] | None = rows[0][0]
        if failpoints.active and ids:
            failpoints.reached("schedule.after_commit")
        return ids

    def pause(self, name: str, paused: bool, by: str) -> bool:
        values = {"name": name, "paused": paused, "by": by, "word": "paused" if paused else "resumed"}
        return bool(self._db.read_connection.write(self._db.sql["pause_schedule"], values))

    def remove(self, name: str, by: str) -> bool:
        return bool(self._db.read_connection.write(self._db.sql["remove_schedule"], {"name": name, "by": by}))

    def list(self) -> list[ScheduleRecord]:
        return [_record(row) for row in self._db.read("schedules")]


def _definition(one: ScheduleDefinition) -> dict[str, Any]:
    own = {name: getattr(one, name) for name in ("name", "fingerprint", "task", "queue", "catch_up", "job")}
    return {**own, "cron": one.timing.cron, "every_s": one.timing.every_s, "zone": one.timing.zone}


def _columns(firing: Firing) -> dict[str, Any]:
    # The function draws the ids itself: it cannot be repeated by mistake, since the version moves on.
    values = columns(range(len(firing.jobs)), [0] * len(firing.jobs), firing.jobs)
    return {name: value for name, value in values.items() if name not in ("ids", "places")}


def _record(row: Row) -> ScheduleRecord:
    return ScheduleRecord(*(*row[:5], Timing(*row[5:8]), *row[8:]))
