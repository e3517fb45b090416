"""Give each process a ledger that it reaches over a network: calls get lost, come late, or are answered with errors."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from greenlet import GreenletExit
from tests.simulation.database import PARTS, READS, Call, Database, Reply, Session, verbs
from tests.simulation.scheduler import Process

from unstuck.domain.liveness import Session as Presence
from unstuck.errors import LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.recovery import WorkerWatch

FILE_LATENCY_S = 0.0005
MOST_CALLS_PER_S = 400
"""A process that calls more often than this has a loop that does not wait."""
WATCHING = verbs("recovery.watch", "recovery.to_judge", "recovery.peers_of", "recovery.tick")


@dataclass
class Cut:
    """Which ways of a road are cut; counted, since faults may overlap."""

    there: int = 0
    back: int = 0


class RemotePart:
    """A part of the ledger as one process sees it: every verb of it is a call over the road."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self._name = name
        self._call = call

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb.startswith("_") or not hasattr(PARTS[self._name], verb):
            raise AttributeError(verb)
        made = partial(self._call, f"{self._name}.{verb}")
        setattr(self, verb, made)
        return made


class NetworkLink:
    """A ledger as one process sees it. Every verb of its parts is a call over this road."""

    def __init__(
        self,
        process: Process,
        server: Database,
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
        self._hub = process.hub
        self.server = server
        self.single_host = server.shape == "file"
        self.cuts = Cut(), Cut()
        """That of the process, and that of its machine."""
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
        self._late: Session | None = None
        """The session whose answer is late: left open until there is another one."""
        self._orphans: list[Session] = []
        """Sessions that this end gave up and the server does not know to be over."""
        self._lost: list[tuple[Call, Callable[..., None], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> RemotePart:
        if name not in PARTS:
            raise AttributeError(name)
        made = RemotePart(name, self._call)
        setattr(self, name, made)
        return made

    @property
    def reaches(self) -> bool:
        """Return whether a call would get there and back."""
        return not (self.hung or self._cut_there or self._cut_back)

    def notify(self, words: set[str]) -> None:
        """Wake who listens; best effort, as in the product."""
        if not self.process.alive:
            raise GreenletExit
        if self.reaches and self.server.writable:
            self._ring(set(words))

    def disconnect(self) -> None:
        """End the session at both ends: the process died, or closed it."""
        session, self._session = self._session, None
        if session is not None:
            self._end(session)
        self._leave_late()

    def _end(self, session: Session) -> None:
        if self.reaches:
            self.server.sessions.discard(session.number)
        else:
            self._orphans.append(session)

    def _give_up_session(self) -> None:
        """Use a session no more whose answer is late, but leave it open: the server must not take its end for ours."""
        self._leave_late()
        self._late, self._session = self._session, None

    def _leave_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._end(late)

    @property
    def active_s(self) -> float:
        """When the server last heard something over a session of this road."""
        sessions = [*self._orphans, self._late, self._session]
        return max((session.active_s for session in sessions if session is not None), default=0.0)

    def forget_session(self) -> None:
        """Let the server end the session, and those that this end gave up while nobody could hear it."""
        self._end_orphans()
        if self._late is not None:
            self.server.sessions.discard(self._late.number)
        if self._session is not None:
            self.server.sessions.discard(self._session.number)
            self.notice_loss()

    def terminate_sessions(self) -> None:
        """Let someone terminate the sessions at the server, whether or not this end can hear of it."""
        for session in (*self._orphans, self._late, self._session):
            if session is not None:
                self.server.terminate(session)
        self._orphans.clear()
        self.notice_loss()

    def notice_loss(self) -> None:
        """Hear that the session was closed at the other end, unless the road is cut."""
        if self._session is not None and self.reaches:
            self._session = None
            self._later(self.process.when_well, self.on_lost)

    def mend(self) -> None:
        """Deliver what was on its way when the road was cut; what nobody waits for any more only sometimes."""
        self._end_orphans()
        lost, self._lost = self._lost, []
        for call, deliver, args in lost:
            if call.session is not None and call.session.incarnation in self.server.vanished:
                # No machine is left that would send it again.
                continue
            if not call.abandoned or self._chance.random() < self._late_share:
                self._later(deliver, *args)

    def _end_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for session in orphans:
            self.server.sessions.discard(session.number)

    # ------------------------------------------------------------------------------------------

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        task = self._hub.current
        if not self.process.alive:
            raise GreenletExit
        assert task is not None, f"{verb} was called from nowhere"
        self._count_call()
        if verb == "workers.register" and not self.single_host:
            args = (self.server.adopt(args[0]),)
        call = Call(self, task, verb, args, kwargs, self._session, self.worker_id)
        self._later(self._arrive, call)
        answer: Reply | None = task.wait(self._deadline_s, call)
        if answer is None:
            call.abandoned = True
            # Another call may have opened the next session already.
            if call.session is not None and call.session is self._session:
                self._give_up_session()
                # Whoever waits for a wake-up on that connection finds it closed.
                self._later(self.process.when_well, self.on_lost)
            kind = LedgerUnavailable if verb in READS else UncertainCommit
            raise kind(f"No answer of the ledger within {self._deadline_s:g}s.")
        if answer.error is not None:
            if self._session is not None and self._session.number not in self.server.sessions:
                self._session = None
            raise answer.error
        return self._with_sessions(verb, answer.value) if verb in WATCHING else answer.value

    def _count_call(self) -> None:
        second = int(self._hub.now_s)
        self._calls = self._calls + 1 if second == self._second else 1
        self._second = second
        if self._calls == MOST_CALLS_PER_S:
            self._on_hammering(self.process.name)

    def _later(self, act: Callable[..., None], *args: Any) -> None:
        self._hub.after(self._latency_s * self.slow * (0.5 + self._chance.random()), act, *args)

    def _arrive(self, call: Call) -> None:
        if self.server.shape == "file":
            # No server executes it for a process that is gone, and a frozen one executes nothing.
            self.process.when_well(self.server.arrive, call)
            return
        connects = call.session is None and not self._pooled
        # No connection is made over a road that is cut one way: both ends must hear each other.
        own, machine = self.cuts
        if self.hung or own.there or machine.there or (connects and (own.back or machine.back)):
            self._lost.append((call, self._arrive, (call,)))
            return
        if connects:
            refused = self.server.connect(call)
            if refused is not None:
                if self.server.full:
                    # It may be the one that takes our own place.
                    self._leave_late()
                call.reply(refused)
                return
            self._session = call.session
            self._leave_late()
        self.server.arrive(call)

    def send_back(self, call: Call, reply: Reply) -> None:
        """Let the answer travel to the task that waits for it."""
        self._hub.after(self._latency_s * self.slow * (0.5 + self._chance.random()), self._return, call, reply)

    def _return(self, call: Call, reply: Reply) -> None:
        own, machine = self.cuts
        if own.back or machine.back:
            self._lost.append((call, self._return, (call, reply)))
        elif not call.abandoned:
            call.task.resume(reply, call)

    @property
    def _cut_there(self) -> bool:
        own, machine = self.cuts
        return own.there > 0 or machine.there > 0

    @property
    def _cut_back(self) -> bool:
        own, machine = self.cuts
        return own.back > 0 or machine.back > 0

    # Sessions -----------------------------------------------------------------------------------

    def _with_sessions(self, verb: str, answer: Any) -> Any:
        """Add what PostgreSQL says of sessions, and SQLite cannot."""
        if self.server.shape == "file":
            return answer
        if verb == "recovery.tick":
            age_s = 0.0 if self._session is None else self.process.hub.now_s - self._session.began_s
            return msgspec.structs.replace(answer, connected_s=age_s)
        if verb == "recovery.to_judge":
            workers, well = answer
            return [self._with_session(worker) for worker in workers], well
        return [self._with_session(worker) for worker in answer]

    def _with_session(self, worker: WorkerWatch) -> WorkerWatch:
        session, stamp = session_of(self.server, worker.id), self.server.stamps.get(worker.id)
        idle_s = None
        if session is Presence.PRESENT and stamp is not None:
            idle_s = self.process.hub.now_s - stamp.active_s
        return msgspec.structs.replace(
            worker,
            session=session,
            session_idle_s=idle_s,
            sessions_doubted_s=0.0 if self.server.is_doubted(worker.id) else math.inf,
            session_id=None if stamp is None else str(stamp.number),
            suspected_session=self.server.suspicions.get(worker.id),
            boot_id=self.server.boot_ids.get(worker.id, worker.boot_id),
        )


def session_of(server: Database, worker_id: str) -> Presence:
    """Return whether the session of a worker is there: the rule of `watch` in PostgreSQL."""
    stamp = server.stamps.get(worker_id)
    if stamp is None or stamp.incarnation != server.incarnation:
        return Presence.UNKNOWN
    if stamp.number in server.sessions:
        return Presence.PRESENT
    return Presence.MISSING
