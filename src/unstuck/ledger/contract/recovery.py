"""What the reaper sees of workers, and what it decides: records and protocol."""

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from unstuck.domain.autopsy import LastWords
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import Detector, Session
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import Transport, WorkerState
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.ledger.contract.workers import HeldRecord, WorkerVerdict


class WorkerWatch(msgspec.Struct, frozen=True):
    """A worker as the reaper sees it."""

    id: str
    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    process_started: str
    status_page: str
    state: WorkerState
    silent_s: float
    """The silence that counts: the time since its last heartbeat that watch periods cover."""
    suspect_after_s: float
    waits_for_s: float | None
    """The longest heartbeat timeout among its RUNNING jobs (infinite where one has `heartbeat=False`)."""
    held: int
    session: Session
    suspect_s: float
    """For how long it has been SUSPECT; 0 where it is not."""
    shortest_s: float | None = None
    """The shortest heartbeat timeout among its RUNNING jobs (those with `heartbeat=False` left out)."""
    transport: Transport = Transport.PYTHON
    since_beat_s: float = 0.0
    """Plain time since its last heartbeat, by the ledger's clock."""
    heartbeat_interval_s: float = 5.0
    suspected_by: Detector | None = None
    """What it is suspected by, or was given up for."""
    session_idle_s: float | None = None
    """How long ago its database session last did something; None if it is gone or cannot be seen."""
    rules: RecoveryRules | None = None
    """The recovery settings that it stored; None: those of whoever judges it."""
    sessions_doubted_s: float = math.inf
    """How long ago it was last in doubt why database sessions are missing; infinite: never."""
    session_id: str | None = None
    """The database session that it last had; None if none is known."""
    suspected_session: str | None = None
    """The session that was missing when it became suspect, if that is why."""


class Ticked(msgspec.Struct, frozen=True):
    """What the ledger answers to a reaper's tick."""

    won: bool = True
    """Whether the ticket that was asked for was free."""
    stale_s: float = 0.0
    """How long ago the watch was last extended."""
    watched_s: float = 0.0
    """How long the current watch period is."""
    began: Cause | None = None
    """Why this tick began a new period; None if it did not."""
    gap_s: float | None = None
    """How long no one watched before the new period; None if it is the first one."""
    set_back_s: float = 0.0
    """By how much the ledger's clock was set back since the last tick."""
    connected_s: float = math.inf
    """The age of the connection that carried the tick."""
    at: float | None = None
    """What the ledger's clock said."""


class GuardSilent(msgspec.Struct, frozen=True):
    """Repeat the evidence in the write: only while this much of the worker's silence counts."""

    silent_s: float


class GuardUnheard(msgspec.Struct, frozen=True):
    """An operator's threshold: only while nothing was heard of the worker for this long, watched or not."""

    silent_s: float


class GuardDead(msgspec.Struct, frozen=True):
    """Only while the worker stands as dead (or stopped) in the ledger."""


class GuardSuspect(msgspec.Struct, frozen=True):
    """Only while the worker is still SUSPECT: it did not beat since."""


class GuardNone(msgspec.Struct, frozen=True):
    """An operator's word, or the kernel's: the token alone is the fence."""


Guard = GuardSilent | GuardUnheard | GuardDead | GuardSuspect | GuardNone


class Recovery(Protocol):
    """Watch workers, declare them dead, and settle the jobs that they held."""

    def tick(self, tick: Tick, ticket: str | None = None, ttl_s: float = 0.0) -> Ticked:
        """Extend the watch over the workers, or begin a new watch period, and take the ticket of that name if it is
        free. Every reaper does this before it judges anyone: silence counts only within watch periods."""
        ...

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        """Return every living worker, and every dead or stopped one that still holds jobs."""
        ...

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        """Like `watch`, without those foreign workers of whom nothing is to be judged: they live, and were heard within
        every timeout that concerns them. Of these only the number is given, so that a round looks at ten thousand in
        the time of a few."""
        ...

    def rules(self) -> list[RecoveryRules]:
        """Return the different recovery settings that Python workers stored, living or gone."""
        ...

    def peers_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        """Return the `size` living workers of this host that follow this one in the order of ids, in a ring."""
        ...

    def declare_dead(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        """Write SUSPECT or DEAD with its event, if the guard still holds; locks the identity row, so that no
        turn of a dead worker commits after it. False: somebody was faster, or it beat."""
        ...

    def amend_verdict(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        """Write down more of how a dead worker ended. Return False if it is not dead."""
        ...

    def held_jobs(self, worker_id: str, limit: int) -> list[HeldRecord]:
        """Like `held`, bounded, oldest first, for the sweep."""
        ...

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        """End attempts of someone else, if the guard still holds; give the (job_id, token) that were written."""
        ...

    def overdue(self, limit: int) -> list[HeldRecord]:
        """Return RUNNING jobs that passed their hard deadline by a grace while their worker is not settling them:
        those of dead or suspect workers, and of any worker 30 s past the deadline. Left out are those whose outcome a
        living worker has in hand, and only a lock keeps from the ledger."""
        ...

    def add_last_words(self, words: Sequence[LastWords]) -> None:
        """Add the last output of jobs to reports of their deaths that were written without it."""
        ...

    def stale(self, older_than_s: float) -> list[HeldRecord]:
        """Return held jobs whose worker has been silent for at least this long, or is dead."""
        ...
