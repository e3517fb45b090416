"""Play the database server: it takes calls from the network, executes them on a real ledger, and can fail in every way.

In the shape `file` the ledger is a file on one machine: no network, no sessions, everybody reads and writes it by
himself. In the shape `server` it is a PostgreSQL somewhere else, with sessions that are evidence of life.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from tests.simulation.clock import Machine, here
from tests.simulation.hub import Hub, Process, Task

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
OBSERVED = frozenset(["register", "beat", "enqueue", "fire_schedule", "turn", "condemn", "settle"])
"""What changes what is true of workers and jobs."""
WAITS_FOR_LOCKS = frozenset(["turn", "settle", "enqueue", "fire_schedule", "promote_due"])
"""On a server only these touch rows that a user's transaction may have locked."""


class Caller(Protocol):
    """Where a call comes from."""

    process: Process

    def send_back(self, call: "Call", reply: "Reply") -> None: ...


@dataclass(eq=False, slots=True)
class Session:
    """A connection as the server sees it."""

    number: int
    incarnation: int
    began_s: float
    """In true time, like the next."""
    active_s: float
    """When it last did something."""


@dataclass(eq=False, slots=True)
class Call:
    """One verb on its way to the ledger and back."""

    caller: Caller
    task: Task
    """Waits for the answer."""
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    session: Session | None
    worker_id: str | None
    """The worker that its process is, if it is one."""
    abandoned: bool = False
    """Nobody waits for the answer any more."""

    @property
    def owner(self) -> str:
        """The process that called."""
        return self.caller.process.name

    def reply(self, reply: "Reply") -> None:
        self.caller.send_back(self, reply)

    @property
    def reads(self) -> bool:
        return self.verb in READS


@dataclass(eq=False, slots=True)
class Reply:
    value: Any = None
    error: Exception | None = None


class Storage(Protocol):
    """A ledger that can be put back to an earlier state."""

    ledger: Any

    def set_time(self, machine: Machine, incarnation: int) -> None: ...

    def save(self) -> Any: ...

    def restore(self, saved: Any) -> None: ...

    def skip_lost_numbers(self) -> None: ...

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
    beats_s: dict[str, float] = field(default_factory=dict)
    """By worker, when its last heartbeat came, in true time."""
    terminated: int = 0
    """How many sessions someone terminated here."""
    counted: int = 0
    """How many of them the ledger knows of: a reaper's tick counts them."""
    suspicions: dict[str, str | None] = field(default_factory=dict)
    """By worker, the session that was missing when it became suspect."""
    doubted_s: float = -1.0
    """When a tick last found that a session may be missing though its worker lives, in true time."""
    on_lost: list[Callable[[], None]] = field(default_factory=list)
    """Those who hear at once that their connection was closed."""
    boot_ids: dict[str, str] = field(default_factory=dict)
    _waiting: list[Call] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _saved: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _saved_s: dict[int, float] = field(default_factory=dict)
    _rewound_s: float = 0.0
    """When a standby that lagged took over last."""
    _promoted: bool = False
    """A standby took over, and the numbers that the lost primary may have given out were not skipped yet."""

    @property
    def writable(self) -> bool:
        """Return whether anybody at all could write now."""
        return not (self.down or self.hung or self.read_only or (self.locked and self.shape == "file"))

    @property
    def in_doubt(self) -> bool:
        """Return whether a session may be missing now though its worker lives: the rule of `tick` in PostgreSQL."""
        return self.full > 0 or self.terminated != self.counted

    def is_doubted(self, worker_id: str) -> bool:
        """Return whether that was so at any look since the last heartbeat of a worker."""
        return self.in_doubt or self.doubted_s >= self.beats_s.get(worker_id, -math.inf)

    def terminate(self, session: Session) -> None:
        """End a session here, as `pg_terminate_backend` does."""
        if session.number in self.sessions:
            self.sessions.discard(session.number)
            self.terminated += 1

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
                self.hub.after(LOCK_BOUND_S, self._give_up, call)
        elif self.read_only and not call.reads:
            call.reply(Reply(error=LedgerUnavailable("The ledger cannot be written.")))
        else:
            self._execute(call)

    def adopt(self, birth: WorkerBirth) -> WorkerBirth:
        """Let a worker of another machine be measured by the clock of this one, as a database server does."""
        self.boot_ids[birth.id] = birth.boot_id
        return msgspec.structs.replace(birth, boot_id=self.machine.boot_id)

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
        fault = self._fault_of(call) if self.flaky else None
        if fault is not None and not fault.after_commit:
            call.reply(Reply(error=LedgerUnavailable("The statement failed.")))
            return
        if call.session is not None:
            call.session.active_s = self.hub.now_s
        here.append(self.machine)
        try:
            self.storage.set_time(self.machine, self.incarnation)
            if self._promoted:
                # Every connection asks for it before anything else, and behind a pooler every call.
                self._promoted = False
                self.storage.skip_lost_numbers()
            answer = getattr(self.storage.ledger, call.verb)(*call.args, **call.kwargs)
        except LedgerError as error:
            call.reply(Reply(error=error))
            return
        finally:
            here.pop()
        if call.verb == "tick" and self.in_doubt:
            self.counted, self.doubted_s = self.terminated, self.hub.now_s
        if call.verb in OBSERVED:
            if call.verb == "condemn" and answer:
                self.suspicions[call.args[0]] = call.args[1].session
            if call.verb in ("beat", "register"):
                self._stamp(call)
            self.observe(call, answer)
        if fault is not None:
            call.reply(Reply(error=UncertainCommit("The answer was lost.")))
        else:
            call.caller.send_back(call, Reply(answer))

    def _fault_of(self, call: Call) -> Flaky | None:
        for fault in self.flaky:
            if fault.owner in (None, call.owner) and self.chance.random() < fault.share:
                return fault
        return None

    def _stamp(self, call: Call) -> None:
        worker_id = call.args[0].worker_id if call.verb == "beat" else call.args[0].id
        if call.verb == "beat" or worker_id not in self.beats_s:
            self.beats_s[worker_id] = self.hub.now_s
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
        doubts = dict(self.beats_s), self.counted, self.doubted_s, dict(self.suspicions)
        self._saved[name] = self.storage.save(), dict(self.stamps), self.known, doubts
        self._saved_s[name] = self.hub.now_s

    def can_lag(self, name: int) -> bool:
        """Return whether what was saved is of the present history: no standby follows one that was lost meanwhile."""
        return self._saved_s[name] >= self._rewound_s

    def fail_over(self, saved: int | None, started_s: float) -> None:
        """Let a standby take over: with all that was committed, or as it was at `saved`."""
        self.incarnation += 1
        self.started_s = started_s
        self._promoted = True
        if saved is not None:
            state, self.stamps, self.known, doubts = self._saved.pop(saved)
            self.beats_s, self.counted, self.doubted_s, self.suspicions = doubts
            self.storage.restore(state)
            self._rewound_s = self.hub.now_s
