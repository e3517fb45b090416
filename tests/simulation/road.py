"""Give each process a ledger that it reaches over a network: calls get lost, come late, or are answered with errors."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from greenlet import GreenletExit
from tests.simulation.hub import Process, Task
from tests.simulation.server import READS, Call, Reply, Server, Session

from unstuck.domain.errors import LedgerUnavailable, UncertainCommit
from unstuck.domain.liveness import Session as Presence
from unstuck.store.records import WorkerWatch

FILE_LATENCY_S = 0.0005
MOST_CALLS_PER_S = 400
"""A process that calls more often than this has a loop that does not wait."""
WATCHING = frozenset({"watch", "to_judge", "ring_of", "tick"})


@dataclass
class Cut:
    """Which ways of a road are cut; counted, since faults may overlap."""

    there: int = 0
    back: int = 0


class Road:
    """A ledger as one process sees it. Every verb of the contract is a call over this road."""

    def __init__(
        self,
        process: Process,
        server: Server,
        chance: random.Random,
        *,
        deadline_s: float,
        latency_s: float,
        pooled: bool,
        late_share: float,
        ring: Callable[[set[str]], None],
        on_hammering: Callable[[str], None],
    ) -> None:
        self.process = process
        self.server = server
        self.one_host = server.shape == "file"
        self.cuts: list[Cut] = []
        """Those of the process and of its machine."""
        self.on_lost: Callable[[], None] = lambda: None
        """Hears that the session was closed at the other end."""
        self.worker_id: str | None = None
        """The worker that was registered over this road, if any."""
        self.slow = 1.0
        self.hung = 0
        self._chance = chance
        self._deadline_s = deadline_s
        self._latency_s = latency_s if server.shape == "server" else FILE_LATENCY_S
        self._pooled = pooled
        self._late_share = late_share
        self._ring = ring
        self._on_hammering = on_hammering
        self._second = -1
        self._calls = 0
        self._session: Session | None = None
        self._orphans: list[Session] = []
        """Sessions that this end gave up and the server does not know to be over."""
        self._lost: list[tuple[Call, Callable[[], None]]] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb.startswith("_"):
            raise AttributeError(verb)
        made = partial(self._call, verb)
        setattr(self, verb, made)
        return made

    @property
    def reaches(self) -> bool:
        """Return whether a call would get there and back."""
        return not self.hung and not any(cut.there or cut.back for cut in self.cuts)

    def ring(self, words: set[str]) -> None:
        """Wake who listens; best effort, as in the product."""
        if not self.process.alive:
            raise GreenletExit
        if self.reaches and self.server.writable:
            self._ring(set(words))

    def disconnect(self) -> None:
        """End the session at both ends: the process died, or closed it."""
        session, self._session = self._session, None
        if session is None:
            return
        if self.reaches:
            session.closed = True
            self.server.sessions.discard(session.number)
        else:
            self._orphans.append(session)

    @property
    def active_s(self) -> float:
        """When the server last heard something over a session of this road."""
        sessions = [*self._orphans, *([self._session] if self._session is not None else [])]
        return max((session.active_s for session in sessions), default=0.0)

    def forget_session(self) -> None:
        """Let the server end the session, and those that this end gave up while nobody could hear it."""
        self._end_orphans()
        if self._session is not None:
            self.server.sessions.discard(self._session.number)
            self.notice_loss()

    def notice_loss(self) -> None:
        """Hear that the session was closed at the other end, unless the road is cut."""
        if self._session is not None and self.reaches:
            self._session = None
            self._later(lambda: self.process.when_well(self.on_lost))

    def mend(self) -> None:
        """Deliver what was on its way when the road was cut; what nobody waits for any more only sometimes."""
        self._end_orphans()
        lost, self._lost = self._lost, []
        for call, deliver in lost:
            if not call.abandoned or self._chance.random() < self._late_share:
                self._later(deliver)

    def _end_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for session in orphans:
            self.server.sessions.discard(session.number)

    # ------------------------------------------------------------------------------------------

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        task = self.process.hub.current
        if not self.process.alive:
            raise GreenletExit
        assert task is not None, f"{verb} was called from nowhere"
        self._count_call()
        if verb == "register" and not self.one_host:
            args = (self.server.adopt(args[0]),)
        call = Call(self.process.name, verb, args, kwargs, reply=lambda reply: self._send_back(call, task, reply))
        call.session = self._session
        call.worker_id = self.worker_id
        self._later(lambda: self._arrive(call))
        answer: Reply | None = task.wait(self._deadline_s, call)
        if answer is None:
            call.abandoned = True
            # Another call may have opened the next session already.
            if call.session is self._session:
                self.disconnect()
                # Whoever waits for a wake-up on that connection finds it closed.
                self._later(lambda: self.process.when_well(self.on_lost))
            kind = LedgerUnavailable if verb in READS else UncertainCommit
            raise kind(f"No answer of the ledger within {self._deadline_s:g}s.")
        if answer.error is not None:
            if self._session is not None and self._session.number not in self.server.sessions:
                self._session = None
            raise answer.error
        return self._with_sessions(verb, answer.value) if verb in WATCHING else answer.value

    def _count_call(self) -> None:
        second = int(self.process.hub.now_s)
        self._calls = self._calls + 1 if second == self._second else 1
        self._second = second
        if self._calls == MOST_CALLS_PER_S:
            self._on_hammering(self.process.name)

    def _later(self, act: Callable[[], None]) -> None:
        self.process.hub.after(self._latency_s * self.slow * self._chance.uniform(0.5, 1.5), act)

    def _arrive(self, call: Call) -> None:
        if self.server.shape == "file":
            # No server executes it for a process that is gone, and a frozen one executes nothing.
            self.process.when_well(lambda: self.server.arrive(call))
            return
        connects = call.session is None and not self._pooled
        # No connection is made over a road that is cut one way: both ends must hear each other.
        if self.hung or any(cut.there or (connects and cut.back) for cut in self.cuts):
            self._lost.append((call, lambda: self._arrive(call)))
            return
        if connects:
            refused = self.server.connect(call)
            if refused is not None:
                call.reply(refused)
                return
            self._session = call.session
        self.server.arrive(call)

    def _send_back(self, call: Call, task: Task, reply: Reply) -> None:
        def arrive() -> None:
            if any(cut.back for cut in self.cuts):
                self._lost.append((call, arrive))
            elif not call.abandoned:
                task.wake(reply, call)

        self._later(arrive)

    # Sessions -----------------------------------------------------------------------------------

    def _with_sessions(self, verb: str, answer: Any) -> Any:
        """Add what PostgreSQL says of sessions, and SQLite cannot."""
        if self.server.shape == "file":
            return answer
        if verb == "tick":
            age_s = 0.0 if self._session is None else self.process.hub.now_s - self._session.began_s
            return msgspec.structs.replace(answer, connected_s=age_s)
        if verb == "to_judge":
            workers, well = answer
            return [self._with_session(worker) for worker in workers], well
        return [self._with_session(worker) for worker in answer]

    def _with_session(self, worker: WorkerWatch) -> WorkerWatch:
        session = session_of(self.server, worker.id)
        idle_s = None
        if session is Presence.PRESENT:
            idle_s = self.process.hub.now_s - self.server.stamps[worker.id].active_s
        return msgspec.structs.replace(
            worker,
            session=session,
            session_idle_s=idle_s,
            boot_id=self.server.boot_ids.get(worker.id, worker.boot_id),
        )


def session_of(server: Server, worker_id: str) -> Presence:
    """Return whether the session of a worker is there: the rule of `watch` in PostgreSQL."""
    stamp = server.stamps.get(worker_id)
    if stamp is None or stamp.incarnation != server.incarnation:
        return Presence.UNKNOWN
    if stamp.number in server.sessions:
        return Presence.PRESENT
    return Presence.UNKNOWN if server.full else Presence.MISSING
