"""Play the database server: it takes calls from the network, executes them on a real ledger, and can fail in every way.

In the shape `file` the ledger is a file on one machine: no network, no sessions, everybody reads and writes it by
himself. In the shape `server` it is a PostgreSQL somewhere else, with sessions that are evidence of life.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from tests.simulation.clock import Machine, stand_on
from tests.simulation.hub import Hub

from unstuck.domain.errors import LedgerBusy, LedgerError, LedgerUnavailable, UncertainCommit
from unstuck.store.records import WorkerBirth

Shape = Literal["file", "server"]

LOCK_BOUND_S = 1.0
"""How long a statement waits for a lock of somebody else's transaction on a server, at most."""
READS = frozenset(
    {
        *("watch", "to_judge", "ring_of", "held", "held_by", "overdue", "stale", "blocked_outcomes"),
        *("outcomes", "missing", "workers", "fleet", "due_schedules", "schedules", "job", "jobs", "events"),
    }
)
WAITS_FOR_LOCKS = frozenset(["turn", "settle", "enqueue", "fire_schedule", "promote_due"])
"""On a server only these touch rows that a user's transaction may have locked."""


@dataclass(eq=False)
class Session:
    """A connection as the server sees it."""

    number: int
    incarnation: int
    began_s: float
    """In true time, like the next."""
    active_s: float
    """When it last did something."""
    closed: bool = False
    """Its client closed it."""


@dataclass(eq=False)
class Call:
    """One verb on its way to the ledger and back."""

    owner: str
    """The process that called."""
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: Callable[["Reply"], None]
    session: Session | None = None
    worker_id: str | None = None
    """The worker that its process is, if it is one."""
    abandoned: bool = False
    """Nobody waits for the answer any more."""

    @property
    def reads(self) -> bool:
        return self.verb in READS


@dataclass(frozen=True)
class Reply:
    value: Any = None
    error: Exception | None = None


class Storage(Protocol):
    """A ledger that can be put back to an earlier state."""

    ledger: Any

    def set_time(self, now: float, incarnation: int) -> None: ...

    def save(self) -> Any: ...

    def restore(self, saved: Any) -> None: ...

    def notice_failovers(self, is_same: Callable[[], bool]) -> None: ...


@dataclass
class Flaky:
    """How often a call fails, before its commit or after it."""

    owner: str | None
    share: float
    after_commit: bool


@dataclass
class Server:
    hub: Hub
    machine: Machine
    storage: Storage
    shape: Shape
    chance: random.Random
    observe: Callable[[Call, Any], None]
    """Hears of every call that was executed, with its answer."""
    tell: Callable[[str], None]
    incarnation: int = 1
    known: int | None = None
    """The incarnation that the ledger knows of: a reaper's tick finds out that it is another one now."""
    started_s: float = -1_000.0
    """When its process began, in true time: a standby may have begun before all others."""
    down: int = 0
    hung: int = 0
    locked: int = 0
    read_only: int = 0
    full: int = 0
    """No slot is left for a new connection."""
    flaky: list[Flaky] = field(default_factory=list)
    vanished: set[int] = field(default_factory=set)
    """Incarnations that ended without a word: what is sent to them is lost."""
    sessions: set[int] = field(default_factory=set)
    stamps: dict[str, Session] = field(default_factory=dict)
    """By worker, the session that its heartbeat came from."""
    on_lost: list[Callable[[], None]] = field(default_factory=list)
    """Those who hear at once that their connection was closed."""
    boot_ids: dict[str, str] = field(default_factory=dict)
    _waiting: list[Call] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _saved: dict[int, tuple[Any, dict[str, Session], int | None]] = field(default_factory=dict)

    @property
    def writable(self) -> bool:
        """Return whether anybody at all could write now."""
        return not (self.down or self.hung or self.read_only or (self.locked and self.shape == "file"))

    # Calls --------------------------------------------------------------------------------------

    def connect(self, call: Call) -> Reply | None:
        """Open a session; return why not, if it cannot be."""
        if self.down:
            return Reply(error=LedgerUnavailable("Connection refused."))
        if self.full:
            return Reply(error=LedgerUnavailable("Too many connections."))
        now_s = self.hub.now_s
        call.session = Session(next(self._numbers), self.incarnation, now_s, now_s)
        self.sessions.add(call.session.number)
        if call.worker_id in self.stamps:
            # A worker that reconnects says so at once, so that the lost session is not taken for a lost worker.
            self.stamps[call.worker_id] = call.session
        return None

    def arrive(self, call: Call) -> None:
        """Take a call from the network."""
        if call.session is not None and call.session.incarnation in self.vanished:
            # Its machine is gone: nobody is there to answer, or to refuse.
            return
        if self.down or (call.session is not None and call.session.number not in self.sessions):
            call.reply(Reply(error=LedgerUnavailable("The connection was lost.")))
        elif self.hung:
            self._waiting.append(call)
        elif self.locked and not call.reads and (self.shape == "file" or call.verb in WAITS_FOR_LOCKS):
            self._waiting.append(call)
            if self.shape == "server":
                self.hub.after(LOCK_BOUND_S, lambda: self._give_up(call))
        elif self.read_only and not call.reads:
            call.reply(Reply(error=LedgerUnavailable("The ledger cannot be written.")))
        else:
            self._execute(call)

    def adopt(self, birth: WorkerBirth) -> WorkerBirth:
        """Let a worker of another machine be measured by the clock of this one, as a database server does."""
        self.boot_ids[birth.id] = birth.boot_id
        return msgspec.structs.replace(birth, boot_id=self.machine.boot_id)

    def closed_by_itself(self, worker_id: str) -> bool:
        """Return whether a worker closed the session that its last heartbeat came from."""
        return worker_id in self.stamps and self.stamps[worker_id].closed

    def is_same(self) -> bool:
        """Return whether the ledger is on the server on which it was at the last tick; it is known from now on."""
        same = self.known in (None, self.incarnation)
        self.known = self.incarnation
        return same or self.shape == "file"

    def _give_up(self, call: Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            call.reply(Reply(error=LedgerBusy("A lock was not released in time.")))

    def _execute(self, call: Call) -> None:
        fault = next((one for one in self.flaky if one.owner in (None, call.owner) and self._strikes(one)), None)
        if fault is not None and not fault.after_commit:
            call.reply(Reply(error=LedgerUnavailable("The statement failed.")))
            return
        if call.session is not None:
            call.session.active_s = self.hub.now_s
        with stand_on(self.machine):
            self.storage.set_time(self.machine.wall_s(), self.incarnation)
            try:
                answer = getattr(self.storage.ledger, call.verb)(*call.args, **call.kwargs)
            except LedgerError as error:
                call.reply(Reply(error=error))
                return
        if call.verb in ("beat", "register"):
            self._stamp(call)
        self.observe(call, answer)
        if fault is not None:
            call.reply(Reply(error=UncertainCommit("The answer was lost.")))
        else:
            call.reply(Reply(answer))

    def _strikes(self, fault: Flaky) -> bool:
        return self.chance.random() < fault.share

    def _stamp(self, call: Call) -> None:
        worker_id = call.args[0].worker_id if call.verb == "beat" else call.args[0].id
        if call.session is not None:
            self.stamps[worker_id] = call.session

    # Faults -------------------------------------------------------------------------------------

    def release(self) -> None:
        """Execute what waited, if nothing keeps it from being executed any more."""
        if self.hung:
            return
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            # In a file who waits for the lock is the process itself; on a server it is the server.
            if not (call.abandoned and self.shape == "file"):
                self.arrive(call)

    def lose_sessions(self) -> None:
        self.sessions.clear()
        self._waiting.clear()
        for notice in self.on_lost:
            notice()

    def vanish(self) -> None:
        """Be gone from one moment to the next: no connection is closed."""
        self.vanished.add(self.incarnation)
        self.sessions.clear()
        self._waiting.clear()

    def restart(self) -> None:
        """Begin anew with the same data."""
        self.lose_sessions()
        self.incarnation += 1
        self.started_s = self.hub.now_s

    def save(self, name: int) -> None:
        """Remember the state of now, for a standby that lags."""
        self._saved[name] = self.storage.save(), dict(self.stamps), self.known

    def fail_over(self, saved: int | None, started_s: float) -> None:
        """Let a standby take over: with all that was committed, or as it was at `saved`."""
        self.incarnation += 1
        self.started_s = started_s
        if saved is not None:
            state, self.stamps, self.known = self._saved.pop(saved)
            self.storage.restore(state)
