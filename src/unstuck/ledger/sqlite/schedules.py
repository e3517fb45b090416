"""Keep schedules: their definitions, and exactly one enqueue per tick."""

import time
from collections.abc import Collection, Mapping, Sequence

import apsw
import msgspec

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
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.enqueue import insert_jobs
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.rows import Row

DUE_AT_ONCE = 100


class Schedules:
    """See `unstuck.ledger.contract.schedules.Schedules`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def know(self, definitions: Sequence[ScheduleDefinition], source: Source) -> list[str]:
        changed: list[str] = []
        if not definitions:
            return changed
        with self._db.write() as cursor:
            for one in definitions:
                refuse_nul(one.name, one.task, one.queue)
                when = one.timing
                row = (one.name, source, one.fingerprint, one.task, one.queue, when.cron, when.every_s, when.zone)
                cursor.execute(SQL["know_schedule"], (*row, one.catch_up, one.job, time.time()))
                if cursor.connection.changes():
                    changed.append(one.name)
        return changed

    def differing(self, known: Mapping[str, str]) -> list[tuple[ScheduleRecord, bool]]:
        with self._db.read() as cursor:
            rows = fetch(cursor, "differing_schedules", (msgspec.json.encode(known).decode(),))
        return [(_record(row[:-1]), bool(row[-1])) for row in rows]

    def restore(self, definition: ScheduleDefinition, replaces: str, message: str) -> bool:
        one, when = definition, definition.timing
        row = (
            one.name,
            one.fingerprint,
            one.task,
            one.queue,
            when.cron,
            when.every_s,
            when.zone,
            one.catch_up,
            one.job,
        )
        with self._db.write() as cursor:
            cursor.execute(SQL["restore_schedule"], (*row, time.time(), replaces))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "schedule_restored", message, about=f"schedule:{one.name}")
        return True

    def due(self, fingerprints: Collection[str], after: Sequence[str] = ()) -> DueSchedules:
        known = msgspec.json.encode(sorted(fingerprints)).decode()
        with self._db.read() as cursor:
            now = time.time()
            ahead = (CLOCK_SET_BACK_S, DUE_AT_ONCE, INTERVAL_SET_BACK_S, INTERVALS_SET_BACK)
            last = msgspec.json.encode(list(after)).decode()
            due = fetch(cursor, "due_schedules", (known, now, *ahead, last))
            next_at = cursor.execute(SQL["next_schedule"], (known, now)).get
        next_in_s = None if next_at is None else next_at - now
        return DueSchedules(now, tuple(_record(row) for row in due), next_in_s, len(due) < DUE_AT_ONCE)

    def fire(self, firing: Firing, wait_s: float = FIRE_WAIT_S) -> list[int] | None:
        # `wait_s` is of no use: there is one write lock for the whole file, and all wait for it alike.
        check_jobs(firing.jobs)
        refuse_nul(firing.message)
        with self._db.write() as cursor:
            ids = _fire(cursor, firing)
            if failpoints.active and ids:
                failpoints.reached("schedule.before_commit")
        if failpoints.active and ids:
            failpoints.reached("schedule.after_commit")
        return ids

    def pause(self, name: str, paused: bool, by: str) -> bool:
        word = "paused" if paused else "resumed"
        with self._db.write() as cursor:
            cursor.execute(SQL["pause_schedule"], (name, paused, by))
            if not cursor.connection.changes():
                return False
            write_event(cursor, f"schedule_{word}", f"Schedule '{name}' was {word} by {by}", about=f"schedule:{name}")
            return True

    def remove(self, name: str, by: str) -> bool:
        with self._db.write() as cursor:
            cursor.execute(SQL["remove_schedule"], (name,))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "schedule_removed", f"Schedule '{name}' was removed by {by}", about=f"schedule:{name}")
            return True

    def list(self) -> list[ScheduleRecord]:
        with self._db.read() as cursor:
            return [_record(row) for row in fetch(cursor, "schedules")]


def _fire(cursor: apsw.Cursor, firing: Firing) -> list[int] | None:
    fired_at = time.time() if firing.jobs else None
    cursor.execute(SQL["fire_schedule"], (firing.name, firing.version, firing.next_at, firing.last_at, fired_at))
    if not cursor.connection.changes():
        return None
    ids = [one.job_id for one in insert_jobs(cursor, firing.jobs)] if firing.jobs else []
    if ids:
        cursor.execute(SQL["note_last_job"], (firing.name, ids[-1]))
    if firing.event is not None:
        write_event(cursor, firing.event, firing.message, about=f"schedule:{firing.name}")
    return ids


def _record(row: Row) -> ScheduleRecord:
    return ScheduleRecord(*(*row[:5], Timing(*row[5:8]), *row[8:10], bool(row[10]), *row[11:]))
