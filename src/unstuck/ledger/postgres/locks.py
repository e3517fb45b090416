"""Find which sessions block a statement that waits for a lock."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from unstuck.domain.text import one_line
from unstuck.domain.units import brief
from unstuck.errors import LedgerBusy, LedgerError
from unstuck.ledger.contract.diagnosis import COUNT_LIMIT, LOOK_GROUPS, Blocker, Waiter
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.connection import ManagedConnection, Row
from unstuck.ledger.postgres.database import Database

MAX_BLOCKERS = 3
MAX_QUERY_CHARS = 200

_BLOCKERS = b"""
select b.pid, a.usename, a.application_name, a.state,
    extract(epoch from clock_timestamp() - a.xact_start)::float8, left(a.query, %(chars)s)
from unnest(pg_blocking_pids(%(pid)s)) b (pid) left join pg_stat_activity a on a.pid = b.pid
order by a.xact_start limit %(most)s
"""


class Blockers:
    """The sessions that a watched session waited for when it was last seen to wait."""

    def __init__(self, connection: ManagedConnection, every_s: float) -> None:
        self._connection = connection
        self._every_s = every_s
        self._seen: list[Row] = []

    @contextmanager
    def watched(self, pid: int) -> Iterator[None]:
        """Look at the session `pid` now and then while the block runs. No connection is opened if it is short."""
        over = threading.Event()
        self._seen = []
        looking = threading.Thread(target=self._look, args=(pid, over), name="unstuck-blockers", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    def describe(self) -> str:
        """Name the sessions for people."""
        return "; ".join(_named(row) for row in self._seen) or "a session that could not be seen"

    def cure(self) -> str:
        """Return how to get them out of the way."""
        ends = ", ".join(f"`select pg_terminate_backend({row[0]})`" for row in self._seen if row[0])
        return f"End that transaction (or that session: {ends})." if ends else "Look for it in pg_locks."

    def _look(self, pid: int, over: threading.Event) -> None:
        values = {"pid": pid, "most": MAX_BLOCKERS, "chars": MAX_QUERY_CHARS}
        while not over.wait(self._every_s):
            try:
                self._seen = self._connection.ask(_BLOCKERS, values) or self._seen
            except LedgerError:
                # Who is in the way is good to know and not needed: there may be no connection left for us.
                return


def _named(row: Row) -> str:
    pid, user, application, state, open_s, query = row
    if not pid:
        return "a prepared transaction (see pg_prepared_xacts)"
    if user is None:
        return f"session {pid}"
    application = f" of {application!r}" if application else ""
    since = f", in a transaction for {brief(open_s)}" if open_s is not None else ""
    return f"session {pid}{application} (user {user}, {state}{since}): {' '.join((query or '').split())}"


OPEN_S = 0.05
"""Transactions of our own are shorter than this, unless they wait themselves."""
PATIENCE_S = 10.0
"""How long a caller who needs an answer waits for other sessions to end their transactions."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
UNKNOWN = "blocked by another session of the database"

T = TypeVar("T")


def past_locks(db: Database, connection: ManagedConnection, call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Call again while another session holds a lock that it needs, then raise LedgerBusy and name that session.

    Each call waits for a moment only, and others use the connection in between."""
    deadline_s = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return call()
        except LedgerBusy as error:
            if time.monotonic() + pause_s > deadline_s:
                who = UNKNOWN
                with suppress(LedgerError):
                    who = lock_holders(db, connection)
                raise LedgerBusy(
                    f"PostgreSQL at {db.address.where} could not do it: {who}. Nothing was written. End that "
                    "transaction, or try again later."
                ) from error
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def write_past_locks(db: Database, query: str, /, **values: Any) -> list[Row]:
    """Write for an operator, who waits for other sessions, though not for ever."""
    return past_locks(db, db.read_connection, lambda: db.read_connection.write(db.sql[query], values))


def lock_holders(db: Database, connection: ManagedConnection, pids: Sequence[int] = ()) -> str:
    """Describe these sessions, or those that may hold what we wait for."""
    rows = connection.ask(db.sql["lock_holders"], {"pids": arrays.int4s(list(pids)), "open_s": OPEN_S})
    if not rows:
        return UNKNOWN
    return "blocked by " + " or ".join(
        f"session {pid} ({name}, {state or 'state unknown'}, in a transaction for {brief(age_s or 0.0)})"
        for pid, name, state, age_s in rows
    )


WAIT_LOOK_S = 1.5
"""Waits of ours are short and repeated after a second at most: one look would miss most of them."""
LOOK_EVERY_S = 0.05
MAX_WAITS = 1_000
PREPARED_PID = 0
"""What `pg_blocking_pids` says for a prepared transaction, which has no process."""
OUR_NAME = "unstuck "
HIDDEN = "<insufficient privilege>"


def find_blockers(db: Database, open_s: float) -> tuple[Blocker, ...]:
    """Return the transactions that have locked something of the ledger for longer than `open_s`."""
    waits = _look_at_waits(db)
    held = _look_at_holders(db, open_s, {pid for waiters in waits.values() for pid in waiters})
    if not held:
        return ()
    deadline_s = time.monotonic() + WAIT_LOOK_S
    waiting: dict[int, dict[int, Waiter]] = {}
    while True:
        _follow(waits, waiting)
        if _is_ours_waiting(waiting, held) or time.monotonic() >= deadline_s:
            break
        time.sleep(LOOK_EVERY_S)
        waits = _look_at_waits(db)
    # A transaction whose age we may not see must at least be the same one as before.
    still = {_identity(row) for row in _look_at_holders(db, open_s, {_pid(row) for row in held})}
    locked = _look_at_jobs(db, held)
    # Whoever waits is not to blame: the transaction at the end of the chain is.
    waiters = {pid for by_pid in waiting.values() for pid in by_pid}
    found = (
        _blocker(row, waiting.get(_pid(row), {}), locked.get(_pid(row), []))
        for row in held
        if _identity(row) in still and _pid(row) not in waiters
    )
    # A long transaction of our own (a migration) is worth a word only if others wait for it.
    return tuple(one for one in found if one.waiting or (one.tables and not one.is_ours))


def _is_ours_waiting(waiting: Mapping[int, Mapping[int, Waiter]], held: Iterable[Row]) -> bool:
    waiters = (waiter for row in held for waiter in waiting.get(_pid(row), {}).values())
    return any(waiter.application.startswith(OUR_NAME) for waiter in waiters)


def _follow(waits: Mapping[int, Mapping[int, Waiter]], waiting: dict[int, dict[int, Waiter]]) -> None:
    """Add each waiter to the transactions at the end of its chain: those that wait for nobody themselves."""
    for pid, by_blocker in waits.items():
        waiter = next(iter(by_blocker.values()))
        for root in _roots(pid, waits):
            waiting.setdefault(root, {})[pid] = waiter


def _roots(pid: int, waits: Mapping[int, Iterable[int]]) -> set[int]:
    roots: set[int] = set()
    seen, left = {pid}, [pid]
    while left:
        for blocker in waits[left.pop()]:
            if blocker not in waits:
                roots.add(blocker)
            elif blocker not in seen:
                seen.add(blocker)
                left.append(blocker)
    return roots


def _look_at_waits(db: Database) -> dict[int, dict[int, Waiter]]:
    """Return, for each session that waits, those that it waits for."""
    waits: dict[int, dict[int, Waiter]] = {}
    for pid, application, blocker in db.read("look_waits", schema=db.quoted_schema, most=MAX_WAITS):
        waits.setdefault(pid, {})[blocker] = Waiter(pid, one_line(application, MAX_QUERY_CHARS))
    return waits


def _look_at_holders(db: Database, open_s: float, pids: Iterable[int]) -> list[Row]:
    return db.read(
        "look_holders",
        schema=db.quoted_schema,
        pids=arrays.int4s(sorted(set(pids) - {PREPARED_PID})),
        open_s=open_s,
        chars=MAX_QUERY_CHARS,
        groups=LOOK_GROUPS,
    )


def _look_at_jobs(db: Database, held: list[Row]) -> dict[int, list[int]]:
    """Return which jobs in the hands of workers each session has locked."""
    if any(row[9] for row in held):
        # A table that is locked as a whole cannot be read, and we would only wait for it.
        return {}
    pids = arrays.int4s([int(row[0]) for row in held if row[0] is not None])
    locked: dict[int, list[int]] = {}
    try:
        for pid, job_id in db.read("look_locked_jobs", pids=pids, jobs=COUNT_LIMIT, groups=LOOK_GROUPS):
            locked.setdefault(pid, []).append(job_id)
    except LedgerError:
        # The table was locked meanwhile, or this role may not read it.
        return {}
    return locked


def _pid(row: Row) -> int:
    return PREPARED_PID if row[0] is None else int(row[0])


def _identity(row: Row) -> tuple[int, str]:
    return _pid(row), row[6]


def _blocker(row: Row, waiting: Mapping[int, Waiter], jobs: list[int]) -> Blocker:
    pid, user, application, state, query, tables, _, gid, age_s, _ = row
    application = one_line(application or "", MAX_QUERY_CHARS)
    return Blocker(
        "session" if pid is not None else "prepared",
        str(pid) if pid is not None else gid or "",
        age_s,
        user or "",
        application,
        state or "",
        "" if query == HIDDEN else one_line(query or "", MAX_QUERY_CHARS),
        tuple(tables or ()),
        tuple(waiting[pid] for pid in sorted(waiting)),
        tuple(jobs),
        application.startswith(OUR_NAME),
    )
