"""Switch workers and hosts off and on, and give what health is judged by."""

import time

import apsw
import msgspec

from unstuck.domain.health import Disabled, Standing
from unstuck.store.manners import politely
from unstuck.store.records import HostRecord
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.rows import disabled_of, standing
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch, write_event


class HealthVerbs(Verbs):
    def standings(self, dead_for_s: float) -> list[Standing]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            rows = cursor.execute(SQL["standings"], (clock.at - dead_for_s,))
            return [standing(row, clock) for row in politely(rows)]

    def hosts(self) -> list[HostRecord]:
        with self.db.read() as cursor:
            return [HostRecord(name, disabled_of(None, disabled)) for name, disabled in fetch(cursor, "hosts")]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        refuse_nul(worker_id, reason, by)
        with self.db.write() as cursor:
            if auto and _unserved_without(cursor, worker_id, None):
                return False
            cursor.execute(SQL["disable"], (worker_id, _flag(reason, by, auto)))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "worker_disabled", f"Disabled by {by}: {reason}", worker_id=worker_id)
            if auto:
                write_event(cursor, "crash_loop", f"Worker {worker_id} was disabled: {reason}", worker_id=worker_id)
        return True

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        refuse_nul(worker_id, reason, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["enable"], (worker_id,))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "worker_enabled", _because(f"Enabled by {by}", reason), worker_id=worker_id)
        return True

    def disable_host(self, host: str, reason: str, by: str, *, auto: bool = False) -> bool:
        refuse_nul(host, reason, by)
        with self.db.write() as cursor:
            if auto and _unserved_without(cursor, None, host):
                return False
            cursor.execute(SQL["disable_host"], (host, _flag(reason, by, auto)))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "host_disabled", f"Host {host!r} was disabled by {by}: {reason}")
            if auto:
                write_event(cursor, "crash_loop", f"Host {host!r} was disabled: {reason}", about=host)
        return True

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        refuse_nul(host, reason, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["enable_host"], (host, time.time()))
            if not cursor.connection.changes():
                return False
            cursor.execute(SQL["forget_health_of_host"], (host,))
            write_event(cursor, "host_enabled", _because(f"Host {host!r} was enabled by {by}", reason))
        return True


def _unserved_without(cursor: apsw.Cursor, worker_id: str | None, host: str | None) -> bool:
    return bool(fetch(cursor, "unserved_without", (worker_id, host, read_clock().at)))


def _flag(reason: str, by: str, auto: bool) -> str:
    return msgspec.json.encode(Disabled(reason, by, time.time(), auto)).decode()


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence
