"""Write events that belong to no other verb, and look at what those who listen ask about."""

from collections.abc import Collection

import msgspec

from unstuck.domain.states import JobState
from unstuck.store.records import Glance
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.verbs import Verbs, fetch, write_event


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
        refuse_nul(kind, message, worker_id or "", about or "")
        with self.db.write() as cursor:
            write_event(cursor, kind, message, job_id=job_id, worker_id=worker_id, about=about)
            return cursor.connection.last_insert_rowid()

    def glance(self, job_ids: Collection[int]) -> list[Glance]:
        if not job_ids:
            return []
        with self.db.read() as cursor:
            rows = fetch(cursor, "glance", (msgspec.json.encode(list(job_ids)).decode(),))
        return [Glance(row[0], JobState(row[1]), *row[2:]) for row in rows]

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        pairs = msgspec.json.encode(list(wanted)).decode()
        with self.db.read() as cursor:
            return {(queue, task) for queue, task in fetch(cursor, "unserved", (pairs, read_clock().at))}
