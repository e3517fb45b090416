"""Do what an operator asks: pause, cancel, retry, purge, and speak to workers."""

from collections.abc import Collection
from typing import Any

from unstuck.store.checks import check_ids
from unstuck.store.postgres import arrays
from unstuck.store.postgres.holders import HolderVerbs
from unstuck.store.postgres.lanes import Row
from unstuck.store.postgres.people import ReadingVerbs
from unstuck.store.postgres.unstopping import unstop_nodes

PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""
CANCEL_BATCH = 1_000
BUSY = "busy"
"""Somebody had it in hand when many were cancelled at once: asked for again, alone."""


class OperatorVerbs(ReadingVerbs, HolderVerbs):
    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused([record.name for record in self.queues()] if queue is None else [queue], True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        paused = [row[0] for row in self.read("paused_queues")]
        return self._set_paused([name for name in paused if queue in (None, name)], False, by)

    def request(self, worker_id: str, what: str, by: str) -> bool:
        return bool(self.read("request", worker_id=worker_id, what=what, by=by))

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        answers: dict[int, str] = {}
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), CANCEL_BATCH):
            answers.update(self._cancel(ids[start : start + CANCEL_BATCH], by))
        for job_id in [job_id for job_id, answer in answers.items() if answer == BUSY]:
            answers.update(self._cancel([job_id], by))
        stopped = [job_id for job_id, answer in answers.items() if answer == "cancelled"]
        for (job_id,) in self.read("nodes_to_stop", ids=arrays.int8s(stopped)) if stopped else ():
            # It was in hand when its workflow was cancelled. Each alone, for the same reason.
            self._write("stop_node", id=job_id, by=by)
        return {job_id: answers[job_id] for job_id in ids}

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        # One at a time: a unique key in use stops one job and not the others.
        answers = {job_id: str(self._write("retry", job_id=job_id, by=by)[0][0]) for job_id in dict.fromkeys(job_ids)}
        unstop_nodes(self, [job_id for job_id, answer in answers.items() if answer == "queued"])
        return answers

    def purge(self, queue: str, by: str) -> int:
        count = 0
        cause = f"queue {queue!r} was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have been locked by a client, or become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            message = f"{count} pending jobs of queue {queue!r} were cancelled by {by}"
            self.read_lane.write(self.sql["tell"], {"kind": "purged", "message": message})
        return count

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while ids := self.read("to_purge", queue=queue, after=after, limit=PURGE_LOOK)[0][0]:
            after = ids[-1]
            # In short transactions: purging a million jobs must not make anybody wait.
            for start in range(0, len(ids), PURGE_BATCH):
                batch = arrays.int8s(ids[start : start + PURGE_BATCH])
                count += int(self._write("purge", ids=batch, cause=cause)[0][0])
        return count

    def _cancel(self, ids: list[int], by: str) -> dict[int, str]:
        return {job_id: answer for job_id, answer, _ in self._write("cancel", ids=arrays.int8s(ids), by=by)}

    def _write(self, query: str, /, **values: Any) -> list[Row]:
        """Write what rows of jobs are needed for: an operator waits for other sessions, though not for ever."""
        return self.past_locks(self.read_lane, lambda: self.read_lane.write(self.sql[query], values))

    def _set_paused(self, names: list[str], paused: bool, by: str) -> list[str]:
        if not names:
            return []
        values = {"names": arrays.texts(names), "paused": paused, "by": by, "word": "paused" if paused else "resumed"}
        return [row[0] for row in self.read_lane.write(self.sql["set_paused"], values)]
