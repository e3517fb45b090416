"""Write events that belong to no other verb, and look at what those who listen ask about."""

from collections.abc import Collection

from unstuck.domain.states import JobState
from unstuck.store.postgres.base import Verbs
from unstuck.store.records import Glance


class TellingVerbs(Verbs):
    def note_event(
        self,
        kind: str,
        message: str,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        about: str | None = None,
    ) -> int:
        values = {"kind": kind, "message": message, "job_id": job_id, "worker_id": worker_id, "about": about}
        # A worker has few connections, and its heartbeat thread must not wait as long as a client does.
        lane = self.client_lane if self.worker_id is None else self.service_lane
        return int(lane.write(self.sql["note_event"], values)[0][0])

    def glance(self, job_ids: Collection[int]) -> list[Glance]:
        rows = self.read("glance", ids=list(job_ids)) if job_ids else []
        return [Glance(row[0], JobState(row[1]), *row[2:]) for row in rows]

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        pairs = list(wanted)
        # Beside the enqueue, on the lane that whoever enqueues has open.
        values = {"queues": [queue for queue, _ in pairs], "tasks": [task for _, task in pairs]}
        return {(queue, task) for queue, task in self.client_lane.ask(self.sql["unserved"], values)}
