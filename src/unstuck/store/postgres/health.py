"""Switch workers and hosts off and on, and give what health is judged by.

On the service lane, since the reaper of every worker asks: it shall not need one more connection for it.
"""

from unstuck.domain.health import Standing
from unstuck.store.manners import politely
from unstuck.store.postgres.base import Verbs
from unstuck.store.postgres.rows import disabled_of, standing
from unstuck.store.records import HostRecord


class HealthVerbs(Verbs):
    def standings(self, dead_for_s: float) -> list[Standing]:
        return [standing(row) for row in politely(self.serve("standings", dead_for_s=dead_for_s))]

    def hosts(self) -> list[HostRecord]:
        return [HostRecord(name, disabled_of(None, disabled)) for name, disabled in self.serve("hosts")]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        rows = self.serve_once("disable", worker_id=worker_id, reason=reason, by=by, auto=auto)
        return bool(rows[0][0])

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        return bool(self.serve_once("enable", worker_id=worker_id, message=_because(f"Enabled by {by}", reason)))

    def disable_host(self, host: str, reason: str, by: str, *, auto: bool = False) -> bool:
        return bool(self.serve_once("disable_host", host=host, reason=reason, by=by, auto=auto)[0][0])

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        message = _because(f"Host {host!r} was enabled by {by}", reason)
        return bool(self.serve_once("enable_host", host=host, message=message))


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence
