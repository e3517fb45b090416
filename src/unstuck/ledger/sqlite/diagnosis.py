"""Look at the health of a ledger in a file: who waits, who sweeps, how full the file and its WAL are."""

import os
import time
from pathlib import Path

import apsw

from unstuck import host
from unstuck.domain.recovery_rules import RecoveryRules, read_all, rules_of_ledger
from unstuck.domain.watch_clock import Cause
from unstuck.errors import LedgerBusy, LedgerError
from unstuck.ledger.contract.diagnosis import (
    COUNT_LIMIT,
    LOOK_ERRORS,
    LOOK_GROUPS,
    LOOK_JOBS,
    LOOK_QUEUES,
    SWEEP_TICKET,
    Blocker,
    Diagnosis,
    JobGroup,
    QueueBacklog,
    RetentionLag,
    TaskBacklog,
    WatchLook,
)
from unstuck.ledger.sqlite.database import CHECKPOINT_PAGES, SQL, Database, fetch
from unstuck.ledger.sqlite.lock import Holder, read_holder
from unstuck.ledger.sqlite.locks import command_of, writer_of
from unstuck.ledger.sqlite.notifier import reaches

READER_LOOK_S = 0.5
LEAST_WRITE_LOOK_S = 0.5
WRITE_LOOK_S = 1.5
"""Writes of ours take milliseconds: whoever keeps all others from writing for this long is in the way."""
FIRST_READ_LOCK = 123
"""Where the locks of readers begin in the -shm file: bytes 123 to 127, one for each state that may be read."""
READ_LOCKS = range(FIRST_READ_LOCK, FIRST_READ_LOCK + 5)


def diagnose(db: Database, rules: RecoveryRules, *, far_s: float, late_s: float) -> Diagnosis:
    """Look at the ledger's own health; `rules` are those of this process."""
    started_s = time.monotonic()
    now_at = time.time()
    with db.read() as cursor:
        unswept_s = look_at_ticket(cursor)
        round_trip_s = time.monotonic() - started_s
        waiting = [name for (name,) in fetch(cursor, "waiting_queues")][:LOOK_QUEUES]
        scheduled = _groups(cursor, "look_scheduled", waiting, now_at, far_s)
        coming = _groups(cursor, "look_coming", waiting, now_at, 0.0)
        overdue = _groups(cursor, "look_overdue", waiting, now_at, late_s)
        quarantined = fetch(cursor, "look_quarantined", (LOOK_ERRORS, LOOK_GROUPS))
        queues = look_at_queues(cursor, now_at)
        overkept = _look_at_retention(cursor, rules, now_at)
        watch = tuple(WatchLook(Cause(row[0]), *row[1:]) for row in fetch(cursor, "look_watch"))
        addresses = fetch(cursor, "bells")
        connection = cursor.connection
        page_bytes, pages, free = (connection.pragma(name) for name in ("page_size", "page_count", "freelist_count"))
    wal_bytes = _size_of(_beside(db, "-wal"))
    stuck, readers = _look_at_wal(db) if wal_bytes >= CHECKPOINT_PAGES * page_bytes else (0, ())
    return Diagnosis(
        database="sqlite",
        now_at=now_at,
        clock_off_s=None,
        round_trip_s=round_trip_s,
        queues=queues,
        scheduled=scheduled,
        coming=coming,
        overdue=overdue,
        quarantined=tuple(JobGroup(*row) for row in quarantined),
        unswept_s=unswept_s,
        overkept=overkept,
        watch=watch,
        deaf=tuple(worker_id for worker_id, address, _ in addresses if not reaches(address)),
        size_bytes=page_bytes * pages,
        free_bytes=page_bytes * free,
        wal_bytes=wal_bytes,
        wal_stuck_pages=stuck,
        readers=readers,
    )


def find_blockers(db: Database, open_s: float) -> tuple[Blocker, ...]:
    """Try to write: if that is not possible for a moment, a write is under way."""
    waited_s = min(max(open_s, LEAST_WRITE_LOOK_S), WRITE_LOOK_S)
    try:
        with db.write(durable=False, patience_s=waited_s):
            return ()
    except LedgerBusy:
        return (_name_writer(db, waited_s),)
    except LedgerError:
        # It cannot be written for another reason, such as a full disk or the rights of this user.
        return ()


def _name_writer(db: Database, waited_s: float) -> Blocker:
    holder = _holder(db)
    pid = writer_of(db.path) or (holder.pid if holder is not None else None)
    if pid is None:
        return Blocker("process", "", waited_s)
    if holder is not None and holder.pid == pid:
        waited_s = max(waited_s, host.boottime_s() - holder.since_boot_s)
    return Blocker("process", str(pid), waited_s, query=command_of(pid), is_ours=holder is not None)


def _holder(db: Database) -> Holder | None:
    """Return which process of ours says that it holds the lock, if it is of this pid namespace."""
    try:
        fd = os.open(db.lock.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = read_holder(fd)
    finally:
        os.close(fd)
    return found if found is not None and found.pid_namespace == (host.pid_namespace() or "-") else None


def _look_at_retention(cursor: apsw.Cursor, rules: RecoveryRules, now_at: float) -> tuple[RetentionLag, ...]:
    stored = read_all(text for (text,) in fetch(cursor, "recovery_rules"))
    kept = rules_of_ledger(stored, rules).kept
    values = (now_at, kept.jobs_s, kept.events_s, COUNT_LIMIT, LOOK_GROUPS)
    return tuple(RetentionLag(*row) for row in fetch(cursor, "look_retention", values))


def _beside(db: Database, ending: str) -> Path:
    return db.path.with_name(db.path.name + ending)


def _look_at_wal(db: Database) -> tuple[int, tuple[int, ...]]:
    """Copy the WAL back, twice: what could not be copied either time is held by a reader, not by a moment."""
    first, before = _copy_back(db), readers_of(_beside(db, "-shm"))
    if first[0] <= first[1]:
        return 0, ()
    time.sleep(READER_LOOK_S)
    second, after = _copy_back(db), readers_of(_beside(db, "-shm"))
    if second[1] != first[1]:
        return 0, ()
    return second[0] - second[1], tuple(sorted(before & after))


def _copy_back(db: Database) -> tuple[int, int]:
    """Return how many pages the WAL has and how many are copied. Waits for no one and keeps no one waiting."""
    with db.read() as cursor:
        try:
            return cursor.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.BusyError, apsw.LockedError):
            # Another process is at it.
            return 0, 0


def readers_of(shared: Path) -> frozenset[int]:
    """Give the processes that read a certain state of the file just now, as the kernel tells of their locks."""
    try:
        # Never opened: closing it would drop SQLite's own locks in this process.
        found = os.stat(shared)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    readers = set()
    for line in lines:
        parts = line.split()
        is_lock = len(parts) == 8 and parts[3] == "READ" and parts[5] == place and parts[6].isdigit()
        if is_lock and int(parts[6]) in READ_LOCKS and int(parts[4]) > 0:
            readers.add(int(parts[4]))
    return frozenset(readers)


def look_at_ticket(cursor: apsw.Cursor) -> float | None:
    row = cursor.execute(SQL["ticket"], (SWEEP_TICKET,)).fetchone()
    # The boot clock of an earlier boot says nothing now.
    return None if row is None or row[1] != host.boot_id() else max(host.boottime_s() - row[0], 0.0)


def _groups(cursor: apsw.Cursor, query: str, queues: list[str], now_at: float, by_s: float) -> tuple[JobGroup, ...]:
    found = [
        JobGroup(queue, *row)
        for queue in queues
        for row in fetch(cursor, query, (queue, now_at, by_s, LOOK_JOBS, LOOK_GROUPS))
    ]
    return tuple(sorted(found, key=lambda group: -group.count)[:LOOK_GROUPS])


def look_at_queues(cursor: apsw.Cursor, now_at: float) -> tuple[QueueBacklog, ...]:
    paused = {name for name, is_paused in fetch(cursor, "queue_names") if is_paused}
    found = []
    for (name,) in fetch(cursor, "ready_queues", (LOOK_QUEUES,)):
        [(ready,)] = fetch(cursor, "count_ready_of", (name, COUNT_LIMIT))
        found.append(QueueBacklog(name, name in paused, ready, _look_at_tasks(cursor, name, now_at)))
    known = {queue.name for queue in found}
    return (*found, *(QueueBacklog(name, True, 0) for name in sorted(paused - known)))


def _look_at_tasks(cursor: apsw.Cursor, queue: str, now_at: float) -> tuple[TaskBacklog, ...]:
    tasks: dict[str, TaskBacklog] = {}
    for job_id, task, run_at in fetch(cursor, "look_ready", (queue, LOOK_JOBS)):
        seen = tasks.get(task, TaskBacklog(task, 0, job_id, 0.0))
        tasks[task] = TaskBacklog(task, seen.count + 1, seen.first_id, max(seen.waited_s, now_at - run_at))
    return tuple(tasks[name] for name in sorted(tasks))


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
