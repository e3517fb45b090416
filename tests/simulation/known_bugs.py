"""Bring old mistakes back, one at a time, to show that the simulation would have found them."""

import math
import time
from collections.abc import Callable

from tests.simulation import network
from tests.simulation.database import Database

from unstuck.domain import liveness
from unstuck.domain.liveness import Detector, Evidence, Session, Verdict
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.workers import Heartbeat, HeartbeatAnswer
from unstuck.ledger.sqlite.clock import Clock
from unstuck.ledger.sqlite.workers import Workers
from unstuck.recovery import reap


def _patch(owner: object, name: str, value: object) -> None:
    """Replace something that is there: a patch of what has moved would make an old mistake silently harmless."""
    assert name in vars(owner), f"{owner} has no {name} of its own any more"
    setattr(owner, name, value)


def amnesty() -> None:
    """Row 1: a heartbeat that comes later than half of the timeout resets the silence of everybody."""
    beat = Workers.beat

    def beat_with_amnesty(self: Workers, pulse: Heartbeat) -> HeartbeatAnswer:
        with self._db.write() as cursor:
            rows = cursor.execute(
                "SELECT w.suspect_after_s, w.heartbeat_interval_s, b.beat_at,"
                " (SELECT max(o.beat_at) FROM unstuck_worker_heartbeats o JOIN unstuck_workers v ON v.id = o.worker_id"
                " WHERE o.worker_id <> w.id AND v.state IN ('active', 'draining', 'suspect'))"
                " FROM unstuck_workers w JOIN unstuck_worker_heartbeats b ON b.worker_id = w.id WHERE w.id = ?",
                (pulse.worker_id,),
            ).fetchall()
            for suspect_after_s, interval_s, beat_at, others_at in rows:
                late = time.time() - beat_at > suspect_after_s / 2
                if late and (others_at is None or others_at <= beat_at + interval_s):
                    cursor.execute("DELETE FROM unstuck_watch_periods")
        return beat(self, pulse)

    _patch(Workers, "beat", beat_with_amnesty)


def any_server() -> None:
    """Row 5: a session is missing although another server answers than the one that knew it."""

    def session_of(server: Database, worker_id: str) -> Session:
        stamp = server.stamps.get(worker_id)
        if stamp is None or server.started_s > stamp.began_s:
            return Session.UNKNOWN
        if stamp.number in server.sessions:
            return Session.PRESENT
        return Session.MISSING

    _patch(network, "session_of", session_of)


def cut_off() -> None:
    """Row 6: the session of a worker that was silent before it ended proves its death."""
    judge = liveness.judge

    def judge_by_any_session(
        vitals: Evidence, *, session_grace_s: float, peers: bool, session: bool, lease: bool = True
    ) -> Verdict | None:
        missing = session and vitals.session_lost
        if missing and vitals.state is WorkerState.SUSPECT and vitals.session_missing_s >= session_grace_s:
            return Verdict(WorkerState.DEAD, Detector.SESSION, "its database session was lost", vitals.silent_s)
        return judge(vitals, session_grace_s=session_grace_s, peers=peers, session=session, lease=lease)

    _patch(liveness, "NOT_CUT_OFF_S", math.inf)
    _patch(reap, "judge", judge_by_any_session)


def raw_clock() -> None:
    """Row 9: silence is what the ledger's clock says, whoever set it."""
    _patch(Clock, "counted_s", lambda self, beat_at: math.inf if beat_at is None else max(0.0, self.at - beat_at))


def undoubted() -> None:
    """Row 18: a session is missing, though someone terminated it or no connection was free."""
    _patch(liveness.Evidence, "session_lost", property(lambda self: self.session is Session.MISSING))


MUTANTS: dict[str, Callable[[], None]] = {
    "amnesty": amnesty,
    "any-server": any_server,
    "cut-off": cut_off,
    "raw-clock": raw_clock,
    "undoubted": undoubted,
}
