"""Write verdicts and settle what the dead held: guarded, so that a beat in between always wins."""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from unstuck import host
from unstuck.domain.autopsy import LastWords, said_fields
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import OVERDUE_GRACE_S, OVERDUE_LOST_GRACE_S, Session
from unstuck.domain.recovery_rules import RecoveryRules, read_all
from unstuck.domain.states import WorkerState
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.ledger.contract.recovery import (
    Guard,
    GuardDead,
    GuardNone,
    GuardSilent,
    GuardSuspect,
    GuardUnheard,
    Ticked,
    WorkerWatch,
)
from unstuck.ledger.contract.workers import HeldRecord, WorkerVerdict
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.connect import Session as PgSession
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.rows import held_job, worker_watch

MUTED_FROM = 3
"""So many sessions missing at once, and more than half of all, are our loss and not theirs."""


class Recovery:
    """See `unstuck.ledger.contract.recovery.Recovery`."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._session: PgSession | None = None
        """The connection that carried the last tick, open since `_connected_s`."""
        self._connected_s = 0.0

    def tick(self, tick: Tick, ticket: str | None = None, ttl_s: float = 0.0) -> Ticked:
        asked_s = host.boottime_s()
        with self._db.service_connection.hold():
            # Other calls of this process were in the way, so it was awake.
            waited_s = host.boottime_s() - asked_s
            claim_s = None if tick.claim_s is None else tick.claim_s + min(waited_s, tick.every_s)
            since_s = None if tick.since_s is None else tick.since_s + waited_s
            values = {**msgspec.structs.asdict(tick), "claim_s": claim_s, "since_s": since_s}
            row = self._db.serve_once("tick", **values, ticket=ticket, ttl_s=ttl_s)[0]
            session = self._db.service_connection.open()
        now_s = host.boottime_s()
        if self._session is not session:
            self._session, self._connected_s = session, now_s
        cause = None if row[3] is None else Cause(row[3])
        return Ticked(row[0], row[1], row[2], cause, row[4], row[5], now_s - self._connected_s, row[6])

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        return _with_sessions(self._db.serve("watch", host=host))

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        rows = self._db.serve("to_judge")
        living = rows.pop()[12]
        workers = _with_sessions(rows)
        return workers, max(0, living - sum(1 for worker in workers if worker.state not in _GONE))

    def rules(self) -> list[RecoveryRules]:
        return read_all(text for (text,) in self._db.serve("recovery_rules"))

    def peers_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        rows = self._db.serve("ring_of", worker_id=worker_id, host=host, size=size)
        return [worker_watch(row, Session.UNKNOWN) for row in rows]

    def declare_dead(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        assert verdict.state in (WorkerState.SUSPECT, WorkerState.DEAD), verdict.state
        what = "Dead worker detected" if verdict.state is WorkerState.DEAD else "Suspect worker"
        message = f"{what}: {worker_id} ({verdict.evidence}; {verdict.detector}, by {verdict.by})"
        kind, silent_s = _guard(guard)
        rows = self._db.serve_once(
            "condemn",
            worker_id=worker_id,
            verdict=_json(verdict),
            guard=kind,
            silent_s=silent_s,
            message=message,
        )
        return bool(rows[0][0])

    def amend_verdict(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        return bool(self._db.serve("amend", worker_id=worker_id, verdict=_json(verdict)))

    def held_jobs(self, worker_id: str, limit: int) -> list[HeldRecord]:
        return [held_job(row) for row in self._db.serve("held_by", worker_id=worker_id, limit=limit)]

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        if not endings and not releases:
            return set()
        kind, silent_s = _guard(guard)
        rows = self._db.serve_once(
            "settle",
            worker_id=worker_id,
            endings=_json(endings) if endings else None,
            releases=_json(releases) if releases else None,
            guard=kind,
            silent_s=silent_s,
        )
        if woken := [queue for _, _, queue in rows if queue is not None]:
            self._db.notify(f"queue:{queue}" for queue in woken)
        return {(job_id, token) for job_id, token, _ in rows if job_id is not None}

    def overdue(self, limit: int) -> list[HeldRecord]:
        rows = self._db.serve("overdue", grace_s=OVERDUE_GRACE_S, lost_grace_s=OVERDUE_LOST_GRACE_S, limit=limit)
        return [held_job(row) for row in rows]

    def add_last_words(self, words: Sequence[LastWords]) -> None:
        self._db.serve(
            "add_last_words",
            job_ids=arrays.int8s([one.job_id for one in words]),
            tokens=arrays.int8s([one.token for one in words]),
            said=arrays.jsonbs([said_fields(one) for one in words]),
        )

    def stale(self, older_than_s: float) -> list[HeldRecord]:
        return [held_job(row) for row in self._db.read("stale", older_than_s=older_than_s)]


_GONE = (WorkerState.DEAD.value, WorkerState.STOPPED.value)


def _with_sessions(rows: list[Row]) -> list[WorkerWatch]:
    """Hear what the sessions say, unless so many are missing at once that it must be us."""
    sessions = [Session(row[13]) for row in rows]
    living = [
        session
        for row, session in zip(rows, sessions, strict=True)
        if row[8] not in _GONE and session is not Session.UNKNOWN
    ]
    missing = living.count(Session.MISSING)
    if missing >= MUTED_FROM and 2 * missing > len(living):
        sessions = [Session.UNKNOWN] * len(rows)
    return [worker_watch(row, session) for row, session in zip(rows, sessions, strict=True)]


def _guard(guard: Guard) -> tuple[str, float | None]:
    match guard:
        case GuardNone():
            return "none", None
        case GuardDead():
            return "dead", None
        case GuardSuspect():
            return "suspect", None
        case GuardSilent():
            return "silent", guard.silent_s
        case GuardUnheard():
            return "unheard", guard.silent_s
        case _:
            assert_never(guard)


def _json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None
