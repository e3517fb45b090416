"""Give each run a ledger of its own, quickly: one that was migrated once is emptied after each run."""

import itertools
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import TopologicalSorter
from operator import attrgetter
from typing import Any, Literal, Protocol

import apsw
import msgspec
import psycopg
from tests.simulation.scheduler import Machine, Process, Scheduler, Task, here
from tests.support.postgres import PgServer, start_postgres

from unstuck.config import IN_MEMORY, Settings
from unstuck.config import Recovery as RecoverySettings
from unstuck.domain.watch_clock import Change, Period, Tick, advance
from unstuck.errors import LedgerBusy, LedgerError, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.admin import Admin
from unstuck.ledger.contract.events import Events
from unstuck.ledger.contract.jobs import Jobs
from unstuck.ledger.contract.maintenance import Maintenance
from unstuck.ledger.contract.queues import Queues
from unstuck.ledger.contract.recovery import Recovery
from unstuck.ledger.contract.schedules import Schedules
from unstuck.ledger.contract.workers import NewWorker, Workers
from unstuck.ledger.contract.workflows import Workflows
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.migrate import FUNCTIONS, MIGRATIONS
from unstuck.ledger.sqlite import recovery
from unstuck.ledger.sqlite.database import SQL
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.maintenance import first_after_restore

_spare: list[apsw.Connection] = []
"""Connections to a ledger as it is after its migration. Each knows its schema and its statements already."""


class SqliteStorage:
    """The real SQLite ledger, in memory."""

    def __init__(self, recovery: RecoverySettings) -> None:
        self.ledger = SqliteLedger(Settings(url=IN_MEMORY, recovery=recovery))
        self._restored = False
        if _spare:
            self.ledger.db._writer = _spare.pop()
        else:
            self._load(_migrated())

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        """Let ticks notice that another server answers, which happens to no file."""

        def advance_here(last: Period | None, now: float, tick: Tick) -> Change:
            return advance(last, now, tick, same_server=is_same())

        recovery.advance = advance_here  # type: ignore[assignment]

    def set_time(self, machine: Machine, incarnation: int) -> None:
        """Do nothing: it reads the clocks of the simulation itself."""

    def save(self) -> bytes:
        with self.ledger.db.read() as cursor:
            saved: bytes = cursor.connection.serialize("main")
        return saved

    def restore(self, saved: Any) -> None:
        self._restored = True
        self._load(saved)

    def skip_lost_numbers(self) -> None:
        """Do what PostgreSQL does in its function of this name."""
        with self.ledger.db.write() as cursor:
            job_id, token = cursor.execute(SQL["last_numbers"]).get
            now = time.time()
            cursor.execute(SQL["set_last_numbers"], (first_after_restore(job_id, now), first_after_restore(token, now)))

    def close(self) -> None:
        """Empty the ledger for the next run; or close it, if something of it was left in an unknown state."""
        connection, self.ledger.db._writer = self.ledger.db._writer, None
        self.ledger.close()
        if connection is None:
            return
        with suppress(apsw.Error):
            if not self._restored and not connection.in_transaction:
                _empty(connection)
                _spare.append(connection)
                return
        connection.close(force=True)

    def _load(self, saved: bytes) -> None:
        with self.ledger.db.read() as cursor:
            cursor.connection.deserialize("main", saved)


def _empty(connection: apsw.Connection) -> None:
    """Bring back the state right after the migration: no query depends on where rows are on which page."""
    with connection:
        for table in _first_rows():
            if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").get is not None:
                connection.execute(f"DELETE FROM {table}")
        for table, rows in _first_rows().items():
            for row in rows:
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


@cache
def _first_rows() -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of each table after the migration, each before those that it refers to.

    So no pragma is needed to empty them: to set one has every statement compiled again."""
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", _migrated())
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    parents = {name: {row[2] for row in connection.execute(f"PRAGMA foreign_key_list({name})")} for name in names}
    order = list(TopologicalSorter(parents).static_order())
    rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in reversed(order)}
    connection.close()
    return rows


@cache
def _migrated() -> bytes:
    ledger = SqliteLedger(Settings(url=IN_MEMORY))
    ledger.migrate()
    with ledger.db.read() as cursor:
        saved: bytes = cursor.connection.serialize("main")
    ledger.close()
    return saved


TEMPLATE = "simulated"
_CLOCK = re.compile(r"(?<![\w.])(?:clock_timestamp|statement_timestamp|now)\(\)")
_TIMELINE = "left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
_TIME = """
create schema simulated;
create unlogged table simulated.time (now timestamptz not null, server text not null);
insert into simulated.time values (to_timestamp(1700000000), '1');
create function simulated.now() returns timestamptz language plpgsql volatile
as $$ declare found timestamptz; begin select t.now into found from simulated.time t; return found; end $$;
create function simulated.server() returns text language plpgsql volatile
as $$ declare found text; begin select t.server into found from simulated.time t; return found; end $$;
"""
_SERVER = """
create or replace function {schema}.incarnation() returns text language plpgsql volatile
as $$ begin return simulated.server(); end $$;
"""
_names = itertools.count(1)
_server: list[PgServer] = []


@contextmanager
def hosting(ledger: str) -> Iterator[None]:
    """Run a server for as long as the block lasts, if this ledger needs one."""
    if ledger != "postgresql":
        yield
        return
    with start_postgres() as server:
        _migrate(server)
        _server[:] = [server]
        try:
            yield
        finally:
            _server.clear()


def _migrate(server: PgServer) -> None:
    server.execute(f"create database {TEMPLATE}")
    server.execute(_TIME, TEMPLATE)
    ledger = PostgresLedger(Settings(url=server.url(TEMPLATE)))
    ledger.migrate(
        migrations=[replace(one, sql=_simulated(one.sql)) for one in MIGRATIONS],
        functions=[replace(one, sql=_simulated(one.sql)) for one in FUNCTIONS],
    )
    server.execute(_SERVER.replace("{schema}", ledger.db.quoted_schema), TEMPLATE)
    ledger.close()


def _simulated(sql: str) -> str:
    return _CLOCK.sub("simulated.now()", sql).replace(_TIMELINE, "simulated.server()")


class PostgresStorage:
    """The real PostgreSQL ledger, in a database of its own."""

    def __init__(self, recovery: RecoverySettings) -> None:
        self._recovery = recovery
        self._pg = _server[0]
        self._name = self._copy(TEMPLATE)
        self._saved: list[str] = []
        self._open()

    def _open(self) -> None:
        self.ledger = PostgresLedger(Settings(url=self._pg.url(self._name), recovery=self._recovery, notify=False))
        db = self.ledger.db
        db.sql = {name: _simulated(sql.decode()).encode() for name, sql in db.sql.items()}
        self._hand = psycopg.connect(self._pg.url(self._name), autocommit=True)

    def _copy(self, template: str) -> str:
        name = f"s{os.getpid()}_{next(_names)}"
        self._pg.execute(f"create database {name} template {template}")
        return name

    def _close(self) -> None:
        self.ledger.close()
        self._hand.close()

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        """Do nothing: the ledger itself notices by its incarnation."""

    def set_time(self, machine: Machine, incarnation: int) -> None:
        """Let the database believe that it runs on this machine, and is this run of the server."""
        now = machine.wall_s()
        self._hand.execute("update simulated.time set now = to_timestamp(%s), server = %s", (now, str(incarnation)))

    def save(self) -> str:
        self._close()
        saved = self._copy(self._name)
        self._saved.append(saved)
        self._open()
        return saved

    def restore(self, saved: str) -> None:
        self._close()
        self._pg.execute(f"drop database {self._name} with (force)")
        self._saved.remove(saved)
        self._name = saved
        self._open()

    def skip_lost_numbers(self) -> None:
        """Do nothing: the ledger itself does, by its timeline."""

    def close(self) -> None:
        self._close()
        for name in (self._name, *self._saved):
            self._pg.execute(f"drop database {name} with (force)")


Shape = Literal["file", "server"]

LOCK_BOUND_S = 1.0
"""How long a statement waits for a lock of somebody else's transaction on a server, at most."""
PARTS: dict[str, type] = {
    "jobs": Jobs,
    "workers": Workers,
    "recovery": Recovery,
    "maintenance": Maintenance,
    "workflows": Workflows,
    "schedules": Schedules,
    "queues": Queues,
    "events": Events,
    "admin": Admin,
}
"""The parts of a ledger, each with its protocol."""


def verbs(*names: str) -> frozenset[str]:
    """Return these names of verbs with their parts; fail if the ledger has no such verb."""
    for name in names:
        part, _, verb = name.partition(".")
        assert hasattr(PARTS[part], verb), f"the ledger has no verb {name}"
    return frozenset(names)


READS = verbs(
    *("recovery.watch", "recovery.to_judge", "recovery.peers_of", "recovery.held_jobs", "recovery.overdue"),
    *("recovery.stale", "workers.held", "workers.blocked_outcomes", "workers.list", "workers.fleet"),
    *("jobs.outcomes", "jobs.missing", "jobs.get", "jobs.list", "schedules.due", "schedules.list", "events.list"),
)
OBSERVED = verbs(
    *("workers.register", "workers.beat", "workers.turn", "jobs.enqueue", "schedules.fire"),
    *("recovery.declare_dead", "recovery.settle"),
)
"""What changes what is true of workers and jobs."""
WAITS_FOR_LOCKS = verbs(
    *("workers.turn", "recovery.settle", "jobs.enqueue", "schedules.fire", "maintenance.promote_due")
)
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
    """One verb on its way to the ledger and back, named with its part."""

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
class Database:
    hub: Scheduler
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

    def adopt(self, birth: NewWorker) -> NewWorker:
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
            answer = attrgetter(call.verb)(self.storage.ledger)(*call.args, **call.kwargs)
        except LedgerError as error:
            call.reply(Reply(error=error))
            return
        finally:
            here.pop()
        if call.verb == "recovery.tick" and self.in_doubt:
            self.counted, self.doubted_s = self.terminated, self.hub.now_s
        if call.verb in OBSERVED:
            if call.verb == "recovery.declare_dead" and answer:
                self.suspicions[call.args[0]] = call.args[1].session
            if call.verb in ("workers.beat", "workers.register"):
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
        worker_id = call.args[0].worker_id if call.verb == "workers.beat" else call.args[0].id
        if call.verb == "workers.beat" or worker_id not in self.beats_s:
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
