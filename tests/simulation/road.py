"""Give each process a ledger of its own that is reached over a network: calls get lost, late, or answered with errors."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from greenlet import GreenletExit
from tests.simulation.hub import Process, Task
from tests.simulation.server import READS, Call, Reply, Server, Session

from unstuck.domain import liveness
from unstuck.domain.errors import LedgerUnavailable, UncertainCommit
from unstuck.store.records import WorkerWatch

FILE_LATENCY_S = 0.0005
WATCHING = frozenset({"watch", "to_judge", "ring_of"})


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
    ) -> None:
        self.process = process
        self.server = server
        self.one_host = server.shape == "file"
        self.cuts: list[Cut] = []
        """Those of the process and of its machine."""
        self.slow = 1.0
        self.hung = 0
        self._chance = chance
        self._deadline_s = deadline_s
        self._latency_s = latency_s if server.shape == "server" else FILE_LATENCY_S
        self._pooled = pooled
        self._late_share = late_share
        self._ring = ring
        self._session: Session | None = None
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
        if session is not None and self.reaches:
            self.server.sessions.discard(session.number)

    def forget_session(self) -> None:
        """Let the server end the session, of which this end hears with its next call."""
        if self._session is not None:
            self.server.sessions.discard(self._session.number)

    def mend(self) -> None:
        """Deliver what was on its way when the road was cut; what nobody waits for any more only sometimes."""
        lost, self._lost = self._lost, []
        for call, deliver in lost:
            if not call.abandoned or self._chance.random() < self._late_share:
                self._later(deliver)

    # ------------------------------------------------------------------------------------------

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        task = self.process.hub.current
        if not self.process.alive:
            raise GreenletExit
        assert task is not None and task.process is self.process, f"{verb} was called from nowhere"
        if verb == "register" and not self.one_host:
            args = (self.server.adopt(args[0]),)
        call = Call(self.process.name, verb, args, kwargs, reply=lambda reply: self._send_back(call, task, reply))
        call.session = self._session
        self._later(lambda: self._arrive(call))
        answer: Reply | None = task.wait(self._deadline_s, call)
        if answer is None:
            call.abandoned = True
            self.disconnect()
            kind = LedgerUnavailable if verb in READS else UncertainCommit
            raise kind(f"No answer of the ledger within {self._deadline_s:g}s.")
        if answer.error is not None:
            if self._session is not None and self._session.number not in self.server.sessions:
                self._session = None
            raise answer.error
        return self._with_sessions(verb, answer.value) if verb in WATCHING else answer.value

    def _later(self, act: Callable[[], None]) -> None:
        self.process.hub.after(self._latency_s * self.slow * self._chance.uniform(0.5, 1.5), act)

    def _arrive(self, call: Call) -> None:
        if self.server.shape == "file":
            # No server executes it for a process that is gone, and a frozen one executes nothing.
            self.process.when_well(lambda: self.server.arrive(call))
            return
        if self.hung or any(cut.there for cut in self.cuts):
            self._lost.append((call, lambda: self._arrive(call)))
            return
        if call.session is None and not self._pooled:
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
        """Say of every worker whether its session is there: as the SQL of PostgreSQL does."""
        if self.server.shape == "file":
            return answer
        if verb == "to_judge":
            workers, well = answer
            return [self._with_session(worker) for worker in workers], well
        return [self._with_session(worker) for worker in answer]

    def _with_session(self, worker: WorkerWatch) -> WorkerWatch:
        boot_id = self.server.boot_ids.get(worker.id, worker.boot_id)
        return msgspec.structs.replace(worker, session=session_of(self.server, worker.id), boot_id=boot_id)


def session_of(server: Server, worker_id: str) -> liveness.Session:
    stamp = server.stamps.get(worker_id)
    if stamp is None or server.started_s > stamp.began_s:
        return liveness.Session.UNKNOWN
    if stamp.number in server.sessions:
        return liveness.Session.PRESENT
    return liveness.Session.MISSING
