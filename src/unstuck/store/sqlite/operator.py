"""Do what an operator asks: pause, cancel, retry, purge, and speak to workers."""

import time
from collections.abc import Callable, Collection

import apsw
import msgspec

from unstuck.domain.states import AttemptState, JobState
from unstuck.store.checks import check_ids
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.reviving import queue_again
from unstuck.store.sqlite.ties import Ended, settled, tied_among
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch, write_event
from unstuck.store.sqlite.workflows import may_reopen, reopen

PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""
STEP_JOBS = 1_000

_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED)

Act = Callable[[apsw.Cursor, int, str, list[Ended]], str]
"""Do it to one job; what others are to be told of goes to the list."""


class OperatorVerbs(Verbs):
    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, False, by)

    def _set_paused(self, queue: str | None, paused: bool, by: str) -> list[str]:
        refuse_nul(queue, by)
        changed = []
        with self.db.write() as cursor:
            known = {name: bool(value) for name, value in cursor.execute(SQL["queue_names"])}
            for name in sorted(known) if queue is None else [queue]:
                if known.get(name, False) is paused:
                    continue
                cursor.execute(SQL["set_paused"], (name, paused, time.time(), by))
                word = "paused" if paused else "resumed"
                write_event(cursor, f"queue_{word}", f"Queue {name!r} was {word} by {by}")
                changed.append(name)
        return changed

    def request(self, worker_id: str, what: str, by: str) -> bool:
        refuse_nul(worker_id, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["request"], (worker_id, what))
            if not cursor.connection.changes():
                return False
            write_event(cursor, f"worker_asked_to_{what}", f"Asked to {what} by {by}", worker_id=worker_id)
        return True

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_cancel, job_ids, by)

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_retry, job_ids, by)

    def purge(self, queue: str, by: str) -> int:
        refuse_nul(queue, by)
        count = 0
        cause = f"queue {queue!r} was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            with self.db.write() as cursor:
                write_event(cursor, "purged", f"{count} pending jobs of queue {queue!r} were cancelled by {by}")
        return count

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while True:
            with self.db.read() as cursor:
                ids = [job_id for (job_id,) in fetch(cursor, "to_purge", (queue, after, PURGE_LOOK))]
            if not ids:
                return count
            after = ids[-1]
            # In short transactions: purging a million jobs must not make the workers of others wait.
            for start in range(0, len(ids), PURGE_BATCH):
                with self.db.write() as cursor:
                    count += _purge(cursor, ids[start : start + PURGE_BATCH], cause)

    def _in_steps(self, act: Act, job_ids: Collection[int], by: str) -> dict[int, str]:
        """In short transactions: nobody should wait for an operator with a long list."""
        refuse_nul(by)
        check_ids(job_ids)
        ids = list(dict.fromkeys(job_ids))
        answers: dict[int, str] = {}
        for start in range(0, len(ids), STEP_JOBS):
            tied: list[Ended] = []
            with self.db.write() as cursor:
                answers.update({job_id: act(cursor, job_id, by, tied) for job_id in ids[start : start + STEP_JOBS]})
                # Once for all: of a workflow and its nodes the end of one must not decide for the others.
                settled(cursor, tied)
        return answers


def _purge(cursor: apsw.Cursor, ids: list[int], cause: str) -> int:
    """Cancel those of these jobs that still wait and have not begun; give how many.

    A pending node of a workflow that has begun is spared: without it the work that is done would be lost."""
    found = fetch(cursor, "still_to_purge", (msgspec.json.encode(ids).decode(),))
    flows = msgspec.json.encode(list({flow for _, flow in found if flow is not None})).decode()
    begun = {flow for (flow,) in fetch(cursor, "begun_workflows", (flows,))}
    chosen = [job_id for job_id, flow in found if flow not in begun]
    cursor.executemany(SQL["cancel_idle_job"], [(job_id, time.time(), cause) for job_id in chosen])
    settled(cursor, [(job_id, AttemptState.CANCELLED) for job_id in tied_among(cursor, chosen)])
    return len(chosen)


def _cancel(cursor: apsw.Cursor, job_id: int, by: str, tied: list[Ended]) -> str:
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is None:
        return "missing"
    state, worker_id = found[:2]
    if state in (JobState.PENDING, JobState.CLAIMED, JobState.WAITING):
        cursor.execute(SQL["cancel_idle_job"], (job_id, time.time(), f"cancelled by {by} before it ran"))
        if found[8]:
            tied.append((job_id, AttemptState.CANCELLED))
        write_event(cursor, "cancelled", f"Cancelled by {by} before it ran", job_id=job_id, worker_id=worker_id)
        return "cancelled"
    if state == JobState.RUNNING:
        cursor.execute(SQL["ask_cancel"], (job_id,))
        write_event(cursor, "cancel_requested", f"{by} asked to cancel it", job_id=job_id, worker_id=worker_id)
        return "requested"
    return "finished"


def _retry(cursor: apsw.Cursor, job_id: int, by: str, _tied: list[Ended]) -> str:
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is not None and found[0] in _ENDED_BADLY and not may_reopen(cursor, job_id):
        return "duplicate"
    answer = queue_again(cursor, job_id, by)
    if answer == "queued" and tied_among(cursor, [job_id]):
        reopen(cursor, job_id, by)
    return answer
