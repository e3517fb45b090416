"""Find transactions that hold locks of the ledger for long, and what waits for them."""

import time
from collections.abc import Iterable, Mapping

from unstuck.domain.errors import LedgerError
from unstuck.domain.names import printable
from unstuck.store.diagnosis import COUNT_LIMIT, LOOK_GROUPS, Blocker, Waiter
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.postgres.lanes import Row

WAIT_LOOK_S = 1.5
"""Waits of ours are short and repeated after a second at most: one look would miss most of them."""
LOOK_EVERY_S = 0.05
MAX_QUERY_CHARS = 200
MAX_WAITS = 1_000
PREPARED_PID = 0
"""What `pg_blocking_pids` says for a prepared transaction, which has no process."""
OUR_NAME = "unstuck "
HIDDEN = "<insufficient privilege>"


def find_blockers(ledger: Verbs, open_s: float) -> tuple[Blocker, ...]:
    """Return the transactions that have locked something of the ledger for longer than `open_s`."""
    waits = _look_at_waits(ledger)
    held = _look_at_holders(ledger, open_s, {pid for waiters in waits.values() for pid in waiters})
    if not held:
        return ()
    deadline_s = time.monotonic() + WAIT_LOOK_S
    waiting: dict[int, dict[int, Waiter]] = {}
    while True:
        _follow(waits, waiting)
        if _is_ours_waiting(waiting, held) or time.monotonic() >= deadline_s:
            break
        time.sleep(LOOK_EVERY_S)
        waits = _look_at_waits(ledger)
    # A transaction whose age we may not see must at least be the same one as before.
    still = {_identity(row) for row in _look_at_holders(ledger, open_s, {_pid(row) for row in held})}
    locked = _look_at_jobs(ledger, held)
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


def _look_at_waits(ledger: Verbs) -> dict[int, dict[int, Waiter]]:
    """Return, for each session that waits, those that it waits for."""
    waits: dict[int, dict[int, Waiter]] = {}
    for pid, application, blocker in ledger.read("look_waits", schema=ledger.quoted_schema, most=MAX_WAITS):
        waits.setdefault(pid, {})[blocker] = Waiter(pid, printable(application, MAX_QUERY_CHARS))
    return waits


def _look_at_holders(ledger: Verbs, open_s: float, pids: Iterable[int]) -> list[Row]:
    return ledger.read(
        "look_holders",
        schema=ledger.quoted_schema,
        pids=arrays.int4s(sorted(set(pids) - {PREPARED_PID})),
        open_s=open_s,
        chars=MAX_QUERY_CHARS,
        groups=LOOK_GROUPS,
    )


def _look_at_jobs(ledger: Verbs, held: list[Row]) -> dict[int, list[int]]:
    """Return which jobs in the hands of workers each session has locked."""
    if any(row[9] for row in held):
        # A table that is locked as a whole cannot be read, and we would only wait for it.
        return {}
    pids = arrays.int4s([int(row[0]) for row in held if row[0] is not None])
    locked: dict[int, list[int]] = {}
    try:
        for pid, job_id in ledger.read("look_locked_jobs", pids=pids, jobs=COUNT_LIMIT, groups=LOOK_GROUPS):
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
    application = printable(application or "", MAX_QUERY_CHARS)
    return Blocker(
        "session" if pid is not None else "prepared",
        str(pid) if pid is not None else gid or "",
        age_s,
        user or "",
        application,
        state or "",
        "" if query == HIDDEN else printable(query or "", MAX_QUERY_CHARS),
        tuple(tables or ()),
        tuple(waiting[pid] for pid in sorted(waiting)),
        tuple(jobs),
        application.startswith(OUR_NAME),
    )
