"""Keep order in queues: lines, limits, expiry, how long an ended job is kept."""

import time
from collections.abc import Collection, Mapping

import apsw
import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.domain.states import AttemptState
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.queues import KeyHolder, KeyRecord, QueueLimitRecord, QueueRecord
from unstuck.ledger.sqlite.claim import queue_room, write_limits
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.concurrency import admit
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.endings import after_end, linked_among
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.notifier import Notifier

PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""


class Queues:
    """See `unstuck.ledger.contract.queues.Queues`."""

    def __init__(self, db: Database, wakeups: Notifier) -> None:
        self._db = db
        self._wakeups = wakeups

    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, False, by)

    def purge(self, queue: str, by: str) -> int:
        refuse_nul(queue, by)
        count = 0
        cause = f"queue '{queue}' was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            with self._db.write() as cursor:
                write_event(cursor, "purged", f"{count} pending jobs of queue '{queue}' were cancelled by {by}")
        return count

    def tasks(self) -> list[TaskRecord]:
        with self._db.read() as cursor:
            return [
                TaskRecord(name, queue, policy, bool(is_async))
                for name, queue, policy, is_async in fetch(cursor, "tasks")
            ]

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        pairs = msgspec.json.encode(list(wanted)).decode()
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            left = {(queue, task) for queue, task in fetch(cursor, "unserved", (pairs, clock.at))}
            if not left:
                return left
            # Nothing was heard of the others for longer than they may be silent: but only watched time counts.
            for beat_at, suspect_after_s, queues, tasks in fetch(cursor, "unheard", (clock.at,)):
                if clock.silent_s(beat_at) < suspect_after_s:
                    served, known = msgspec.json.decode(queues), msgspec.json.decode(tasks)
                    left -= {(queue, task) for queue, task in left if queue in served and task in known}
            return left

    def limits(self) -> list[QueueLimitRecord]:
        records = []
        with self._db.read() as cursor:
            for name, *columns, limited_by in fetch(cursor, "queue_limits"):
                free = queue_room(cursor, name, columns)
                held = cursor.execute(SQL["count_held_of_queue"], (name,)).get
                limit = QueueLimit(*columns[:3])
                records.append(QueueLimitRecord(name, limit, limited_by, held, free.jobs, free.in_s))
        return records

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        if limits:
            refuse_nul(*limits)
            with self._db.write() as cursor:
                write_limits(cursor, limits)

    def limit(self, queue: str, limit: QueueLimit, by: str) -> None:
        refuse_nul(queue, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["limit_queue"], (queue, limit.concurrency, limit.rate, limit.window_s, by))
            word = "was limited" if limit else "has no limit any more"
            write_event(cursor, "queue_limited", f"Queue '{queue}' {word} ({by})")
        self._wakeups.notify_queues([queue])

    def unlimit(self, queue: str, by: str) -> None:
        refuse_nul(queue, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["limit_queue"], (queue, None, None, None, None))
            write_event(cursor, "queue_limited", f"Queue '{queue}' takes its limit from its app again ({by})")
        self._wakeups.notify_queues([queue])

    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        with self._db.read() as cursor:
            rows = fetch(cursor, "lines", (key, limit))
        return [KeyRecord(*(*row[:4], _in_line(row[4]))) for row in rows]

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        refuse_nul(key, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["pin_places"], (key, places, by if places is not None else None, time.time()))
            word = "takes its limit from its jobs again" if places is None else f"has {places} places now"
            write_event(cursor, "line_limited", f"Line '{key}' {word} ({by})")
            woken = admit(cursor, {key})
        self._wakeups.notify_queues(woken)

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while True:
            with self._db.read() as cursor:
                ids = [job_id for (job_id,) in fetch(cursor, "to_purge", (queue, after, PURGE_LOOK))]
            if not ids:
                return count
            after = ids[-1]
            # In short transactions: purging a million jobs must not make the workers of others wait.
            for start in range(0, len(ids), PURGE_BATCH):
                with self._db.write() as cursor:
                    count += _purge(cursor, ids[start : start + PURGE_BATCH], cause)

    def _set_paused(self, queue: str | None, paused: bool, by: str) -> list[str]:
        refuse_nul(queue, by)
        changed = []
        with self._db.write() as cursor:
            known = {name: bool(value) for name, value in cursor.execute(SQL["queue_names"])}
            for name in sorted(known) if queue is None else [queue]:
                if known.get(name, False) is paused:
                    continue
                cursor.execute(SQL["set_paused"], (name, paused, time.time(), by))
                word = "paused" if paused else "resumed"
                write_event(cursor, f"queue_{word}", f"Queue '{name}' was {word} by {by}")
                changed.append(name)
        return changed

    def list(self) -> list[QueueRecord]:
        now = time.time()
        with self._db.read() as cursor:
            paused = {name: bool(is_paused) for name, is_paused in fetch(cursor, "queue_names")}
            ready = {queue: (count, oldest) for queue, count, oldest in fetch(cursor, "count_ready")}
            waiting = dict(fetch(cursor, "count_waiting"))
            suspended = {queue: (count, timed) for queue, count, timed in fetch(cursor, "count_suspended")}
            blocked = dict(fetch(cursor, "count_blocked_by_queue"))
            held = {(queue, state): count for queue, state, count in fetch(cursor, "count_held")}
            served = dict(fetch(cursor, "queues_served"))
            tasks = {row[1] for row in fetch(cursor, "tasks")}
            since = {queue: cursor.execute(SQL["run_at_of"], (oldest,)).get for queue, (_, oldest) in ready.items()}
        names = {name for name, is_paused in paused.items() if is_paused}
        names |= {*ready, *waiting, *suspended, *blocked, *(queue for queue, _ in held), *served, *tasks}
        return [
            QueueRecord(
                name=name,
                paused=paused.get(name, False),
                pending=ready[name][0] if name in ready else 0,
                scheduled=waiting.get(name, 0) - suspended.get(name, (0, 0))[1],
                claimed=held.get((name, "claimed"), 0),
                running=held.get((name, "running"), 0),
                oldest_pending_s=max(now - since[name], 0.0) if since.get(name) is not None else None,
                workers=served.get(name, 0),
                waiting=suspended.get(name, (0, 0))[0],
                blocked=blocked.get(name, 0),
            )
            for name in sorted(names)
        ]


def _in_line(stored: str) -> tuple[KeyHolder, ...]:
    return tuple(KeyHolder(*one) for one in sorted(msgspec.json.decode(stored)))


def _purge(cursor: apsw.Cursor, ids: list[int], cause: str) -> int:
    """Cancel those of these jobs that still wait and have not begun; give how many.

    A pending node of a workflow that has begun is spared: without it the work that is done would be lost."""
    found = fetch(cursor, "still_to_purge", (msgspec.json.encode(ids).decode(),))
    flows = msgspec.json.encode(list({flow for _, flow in found if flow is not None})).decode()
    begun = {flow for (flow,) in fetch(cursor, "begun_workflows", (flows,))}
    chosen = [job_id for job_id, flow in found if flow not in begun]
    cursor.executemany(SQL["cancel_idle_job"], [(job_id, time.time(), cause) for job_id in chosen])
    after_end(cursor, [(job_id, AttemptState.CANCELLED) for job_id in linked_among(cursor, chosen)])
    return len(chosen)
