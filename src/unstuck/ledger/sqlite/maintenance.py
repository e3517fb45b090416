"""Do the chores: tickets, due jobs, retention, and the first hour after a restore."""

import time
from collections.abc import Collection

import apsw
import msgspec

from unstuck import host
from unstuck.domain.liveness import Detector
from unstuck.domain.states import FINAL_STATES, AttemptState, WorkerState
from unstuck.domain.workflows import NodeState
from unstuck.ledger.contract.maintenance import Expired, KeysChecked, Promoted, Repaired, Swept
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.ledger.sqlite.admin import this_minute
from unstuck.ledger.sqlite.advance import advance, end_node, recount, resolve, result_missing
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.concurrency import admit
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.endings import expire
from unstuck.ledger.sqlite.notifier import Notifier

WINDOW_ROWS = 10_000
"""How many rows one retention step looks at; bounds the time that it keeps the write lock."""
SKIPPED_AT_LEAST = 1_000_000_000
"""How far numbers jump after a restore, even if the last one was a moment ago or the clock is wrong."""
SKIPPED_MORE = 1_000_000_000_000
"""In these cases the time decides how much more, below this: two restores of one backup give out different numbers."""
CLOCK_STEP_S = 2.0
"""Clocks are corrected by less than that all the time."""
RETRIES_LOOKED_AT = 500
"""Of each queue, how many waiting jobs are looked at for a step of the clock that no reaper saw: those due soonest."""
REPAIR_LOOK = 20_000
"""How many nodes one round of repair looks at; the next goes on behind them."""
NUMBERED_TABLES = ("unstuck_events", "unstuck_audit")


class Maintenance:
    """See `unstuck.ledger.contract.maintenance.Maintenance`."""

    def __init__(self, db: Database, wakeups: Notifier) -> None:
        self._db = db
        self._wakeups = wakeups
        self._repaired_up_to = 0

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        # Most ask in vain: they must not queue for the write lock to hear it.
        with self._db.read() as cursor:
            if is_taken(cursor, name):
                return False
        with self._db.write() as cursor:
            return take(cursor, name, ttl_s)

    def promote_due(self, limit: int) -> Promoted:
        now = time.time()
        with self._db.read() as cursor:
            due, next_at = _look_at_waiting(cursor, now)
        if not due:
            return Promoted(0, frozenset(), None if next_at is None else max(next_at - now, 0.0))
        count, woken = 0, set()
        with self._db.write() as cursor:
            for queue in due:
                lines = fetch(cursor, "promote_due", (queue, now, limit - count))
                if lines:
                    woken.add(queue)
                    count += len(lines)
                    admit(cursor, {line for (line,) in lines if line is not None})
                if count >= limit:
                    break
            _, next_at = _look_at_waiting(cursor, now)
        return Promoted(count, frozenset(woken), None if next_at is None else max(next_at - time.time(), 0.0))

    def expire_due(self, limit: int) -> Expired:
        with self._db.read() as cursor:
            next_at = cursor.execute(SQL["next_expiry"]).get
        if next_at is None or next_at > time.time():
            return Expired(0, frozenset(), None if next_at is None else max(next_at - time.time(), 0.0))
        with self._db.write() as cursor:
            found = [job_id for (job_id,) in fetch(cursor, "expired", (time.time(), limit))]
            woken = expire(cursor, found)
            next_at = cursor.execute(SQL["next_expiry"]).get
        self._wakeups.notify_queues(woken)
        return Expired(len(found), frozenset(woken), None if next_at is None else max(next_at - time.time(), 0.0))

    def follow_clock(self, limit: int) -> float:
        with self._db.read() as cursor:
            found = cursor.execute(SQL["clock"]).fetchone()
            now, ahead_s = time.time(), time.time() - host.boottime_s()
            ahead = cursor.execute(SQL["began_in_future"], (now + CLOCK_STEP_S,)).get
            unseen = _retries_of_future(cursor, now)
        step_s = None if found is None or found[0] != host.boot_id() else found[1] - ahead_s
        if step_s is not None and abs(step_s) < CLOCK_STEP_S and not ahead and not unseen:
            return 0.0
        with self._db.write() as cursor:
            cursor.execute(SQL["note_clock"], (host.boot_id(), ahead_s))
            cursor.execute(SQL["set_back_beginnings"], (now, max(step_s or 0.0, 0.0), CLOCK_STEP_S, limit))
            if step_s is None or step_s < CLOCK_STEP_S:
                # It was set back while no reaper was there to see it.
                for job_id, ended_at in unseen:
                    cursor.execute(SQL["set_back_retry"], (job_id, now, ended_at - now))
                    cursor.execute(SQL["set_back_ends"], (job_id, now, ended_at - now))
                return 0.0
            for (queue,) in fetch(cursor, "waiting_queues"):
                cursor.execute(SQL["set_back_ends_of_retries"], (queue, now, step_s, limit))
                cursor.execute(SQL["set_back_retries"], (queue, now, step_s, limit))
            cursor.execute(SQL["set_back_conditions"], (now,))
        return float(step_s)

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        with self._db.read() as cursor:
            keys = [key for (key,) in fetch(cursor, "lines_after", (after, limit))]
            next_after = keys[-1] if len(keys) == limit else None
            suspects = {key for key in keys if _may_need_care(cursor, key)}
            # Blocked jobs whose line has no row: a backup, or somebody's hand.
            place = after
            for _ in range(limit):
                found = cursor.execute(SQL["next_blocked_line"], (place,)).get
                if found is None or (next_after is not None and found > next_after):
                    break
                place = found
                if place not in keys:
                    suspects.add(place)
        if not suspects:
            return KeysChecked(next_after, 0, 0, frozenset())
        repaired, removed, woken = 0, 0, set()
        with self._db.write() as cursor:
            for key in sorted(suspects):
                if let_in := admit(cursor, {key}):
                    repaired += 1
                    woken |= let_in
                    message = f"Line '{key}' had a free place that nobody was let in to; the next went in"
                    write_event(cursor, "line_repaired", message)
                    continue
                cursor.execute(SQL["close_line"], (key,))
                removed += cursor.connection.changes()
        self._wakeups.notify_queues(woken)
        return KeysChecked(next_after, repaired, removed, frozenset(woken))

    def repair_workflows(self, limit: int) -> list[Repaired]:
        with self._db.read() as cursor:
            # Most look in vain: they must not queue for the write lock to hear it.
            ids, self._repaired_up_to = _next_open(cursor, self._repaired_up_to)
            if not fetch(cursor, "nodes_of_the_gone", (ids, 1)) and not fetch(cursor, "workflows_at_rest", (ids, 1)):
                return []
        found: list[Repaired] = []
        woken: set[str] = set()
        with self._db.write() as cursor:
            found += [_repair_node(cursor, woken, *row) for row in fetch(cursor, "nodes_of_the_gone", (ids, limit))]
            for (workflow_id,) in fetch(cursor, "workflows_at_rest", (ids, limit)):
                woken |= recount(cursor, workflow_id)
                found.append(Repaired(workflow_id, "nothing of it went on"))
            for one in found:
                write_event(cursor, "workflow_repaired", f"Repaired: {one.what}", job_id=one.workflow_id)
        self._wakeups.notify_queues(woken)
        return found

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        now = time.time()
        # What was removed and is lost with the power is removed again.
        with self._db.write(durable=False) as cursor:
            began_s = time.monotonic()
            start = cursor.execute(SQL["sweep_position"]).get
            jobs, position = _delete_finished(cursor, start, now - jobs_s, frozenset(FINAL_STATES), limit)
            if position != start:
                cursor.execute(SQL["set_sweep_position"], (position,))
            cursor.execute(SQL["sweep_events"], (now - events_s, limit, now))
            events = cursor.connection.changes()
            cursor.execute(SQL["sweep_workers"], (now - workers_s, limit))
            workers = cursor.connection.changes()
        more = position > 0 or events >= limit or workers >= limit
        return Swept(jobs, events, workers, more=more, took_s=time.monotonic() - began_s)

    def sweep_kept(self, limit: int) -> Swept:
        now = time.time()
        with self._db.write(durable=False) as cursor:
            began_s = time.monotonic()
            cursor.execute(SQL["sweep_kept_keys"], (now, limit))
            keys = cursor.connection.changes()
            found: list[int] = []
            keep_s = -1.0
            while len(found) < limit:
                keep_s = cursor.execute(SQL["next_keep_s"], (keep_s,)).get
                if keep_s is None:
                    break
                found += [
                    one for (one,) in fetch(cursor, "kept_long_enough", (keep_s, now - keep_s, limit - len(found)))
                ]
            jobs = delete_jobs(cursor, found)
        return Swept(jobs, keys=keys, more=max(jobs, keys) >= limit, took_s=time.monotonic() - began_s)

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        with self._db.write() as cursor:
            cursor.execute(SQL["sweep_audit"], (time.time() - older_than_s, limit))
            return int(cursor.connection.changes())

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        with self._db.write() as cursor:
            cursor.execute(SQL["sweep_counters"], (this_minute() - kept_minutes, limit))
            return cursor.connection.changes()

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        wanted = frozenset(states) & FINAL_STATES if states else FINAL_STATES
        before = time.time() - older_than_s
        removed, position = 0, 0
        while True:
            # Many short transactions: a prune of millions must not make the workers wait.
            with self._db.write() as cursor:
                count, position = _delete_finished(cursor, position, before, wanted, WINDOW_ROWS)
            removed += count
            if position == 0:
                return removed


def void_tokens(db: Database) -> int:
    """Declare every living worker dead and every token void; return the number of workers."""
    with db.write() as cursor:
        # Before the events below: a client that remembers the last event it saw must hear of them.
        _skip_numbers(cursor)
        workers = [worker_id for (worker_id,) in fetch(cursor, "living_worker_ids")]
        evidence = "the ledger was restored from a backup"
        text = msgspec.json.encode(
            WorkerVerdict(WorkerState.DEAD, Detector.OPERATOR, evidence, 0.0, "operator")
        ).decode()
        for worker_id in workers:
            cursor.execute(SQL["bury_worker"], (worker_id, text, time.time()))
            write_event(cursor, "worker_dead", f"Dead worker detected: {worker_id} ({evidence})", worker_id=worker_id)
        cursor.execute(SQL["release_all_claimed"])
        running = [job_id for (job_id,) in fetch(cursor, "running_job_ids")]
        if running:
            first = cursor.execute(SQL["reserve_tokens"], (len(running),)).get - len(running) + 1
            cursor.executemany(SQL["replace_token"], [(job_id, first + n) for n, job_id in enumerate(running)])
    return len(workers)


def first_after_restore(last: int, now: float) -> int:
    """Return the number from which a sequence goes on after a restore: the time in microseconds since 1970.

    A sequence that hands out fewer than a million numbers per second is always behind that. So whatever was handed out
    before is lower, however old the backup is, however fast jobs came, and even if the same backup is restored twice.
    Such a number is below 2^53 until the year 2255, so that JSON carries it exactly."""
    now_us = int(now * 1_000_000)
    return now_us if last + SKIPPED_AT_LEAST <= now_us else last + SKIPPED_AT_LEAST + now_us % SKIPPED_MORE


def _skip_numbers(cursor: apsw.Cursor) -> None:
    now = time.time()
    job_id, token = cursor.execute(SQL["last_numbers"]).get
    cursor.execute(SQL["set_last_numbers"], (first_after_restore(job_id, now), first_after_restore(token, now)))
    for table in NUMBERED_TABLES:
        last = cursor.execute(SQL["last_row_number"], (table,)).get or 0
        cursor.execute(SQL["forget_row_number"], (table,))
        cursor.execute(SQL["set_row_number"], (table, first_after_restore(last, now)))


def is_taken(cursor: apsw.Cursor, name: str) -> bool:
    """Return whether someone else has the ticket of this name."""
    clock = read_clock()
    found = cursor.execute(SQL["ticket"], (name,)).fetchone()
    return found is not None and found[1] == clock.boot_id and clock.boot_s < found[0] <= clock.boot_s + 86400


def take(cursor: apsw.Cursor, name: str, ttl_s: float) -> bool:
    """Take a ticket inside a write, unless someone was faster."""
    clock = read_clock()
    cursor.execute(SQL["take_ticket"], (name, clock.boot_s, clock.boot_id, ttl_s))
    return bool(cursor.connection.changes())


def _look_at_waiting(cursor: apsw.Cursor, now: float) -> tuple[list[str], float | None]:
    """Give the queues that have something due, and when the next of the others will be."""
    due: list[str] = []
    next_at: float | None = None
    for (queue,) in fetch(cursor, "waiting_queues"):
        at = cursor.execute(SQL["next_due"], (queue,)).get
        if at is not None and at <= now:
            due.append(queue)
        elif at is not None:
            next_at = at if next_at is None else min(next_at, at)
    return due, next_at


def _delete_finished(
    cursor: apsw.Cursor, after_id: int, before: float, states: Collection[str], look: int
) -> tuple[int, int]:
    """Delete old jobs among the next `look` by id; return the count, and where to go on (0: from the start)."""
    now = time.time()
    rows = fetch(cursor, "finished_window", (after_id, look))
    # Its task may have asked to keep it for longer.
    found = [
        job_id
        for job_id, finished_at, state, keep_s, _ in rows
        if finished_at is not None and finished_at < min(before, now - (keep_s or 0.0)) and state in states
    ]
    # Ids go with time. A job from the future (the clock was set back) says nothing of the age of those behind it.
    young = any(before < enqueued_at <= now for *_, enqueued_at in rows)
    position = rows[-1][0] if len(rows) == look and not young else 0
    return delete_jobs(cursor, found), position


def delete_jobs(cursor: apsw.Cursor, found: list[int]) -> int:
    """Remove ended jobs with all that belongs to them; give how many."""
    if not found:
        return 0
    # Others of its workflow may still need the result of a job.
    wanted = {job_id for (job_id,) in fetch(cursor, "jobs_of_open_workflows", (_json(found),))}
    found = [job_id for job_id in found if job_id not in wanted]
    cursor.execute(SQL["forget_workflows"], (_json(found),))
    cursor.execute(SQL["delete_jobs"], (_json(found),))
    return len(found)


def _json(job_ids: list[int]) -> str:
    return msgspec.json.encode(job_ids).decode()


def _retries_of_future(cursor: apsw.Cursor, now: float) -> list[tuple[int, float]]:
    """Return retries of attempts that ended later than now, with when those ended."""
    found: list[tuple[int, float]] = []
    for (queue,) in fetch(cursor, "waiting_queues"):
        found += fetch(cursor, "retries_of_future", (queue, now, CLOCK_STEP_S, RETRIES_LOOKED_AT))
    return found


def _may_need_care(cursor: apsw.Cursor, key: str) -> bool:
    """Say whether a line looks empty, or free while somebody waits; seen without the lock, and so looked at again."""
    taken = cursor.execute(SQL["count_in_line"], (key,)).get
    blocked = cursor.execute(SQL["count_blocked"], (key,)).get
    return bool((blocked > 0 and taken < cursor.execute(SQL["places_of"], (key,)).get) or taken + blocked == 0)


def _next_open(cursor: apsw.Cursor, after: int) -> tuple[str, int]:
    """Give the workflows that one round of repair looks at, and behind which the next one goes on."""
    ids: list[int] = []
    left = REPAIR_LOOK
    for workflow_id, nodes in cursor.execute(SQL["open_workflows"], (after,)):
        ids.append(workflow_id)
        left -= (nodes or 0) + 1
        if left <= 0:
            return msgspec.json.encode(ids).decode(), workflow_id
    return msgspec.json.encode(ids).decode(), 0


def _repair_node(
    cursor: apsw.Cursor,
    woken: set[str],
    workflow_id: int,
    place: int,
    name: str,
    job_id: int,
    there: int | None,
    state: str | None,
) -> Repaired:
    if there is None:
        end_node(cursor, workflow_id, place, NodeState.FAILED, result_missing(name, job_id))
        woken |= resolve(cursor, workflow_id, [place])
        return Repaired(workflow_id, f"node {name} waited for job {job_id}, which is not there any more")
    woken |= advance(cursor, [(job_id, AttemptState.FAILED)])
    return Repaired(workflow_id, f"node {name} waited for job {job_id}, which is {state}")
