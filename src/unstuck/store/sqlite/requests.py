"""Take jobs in once per request, however often it is sent."""

import time
from collections.abc import Callable, Sequence

import apsw
import msgspec

from unstuck.store.checks import check_jobs
from unstuck.store.records import Enqueued, NewJob, OnceAnswer, Request
from unstuck.store.sqlite.client import insert_jobs
from unstuck.store.sqlite.verbs import SQL, Verbs

CLEARED = 20

_decode = msgspec.json.Decoder(list[tuple[int, bool]]).decode


class RequestVerbs(Verbs):
    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        check_jobs(jobs)
        with self.db.write() as cursor:
            return insert_once(cursor, request, jobs)


def insert_once(cursor: apsw.Cursor, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
    """Insert jobs under the write lock that the caller holds, unless this request did so before."""
    return once(cursor, request, lambda: insert_jobs(cursor, jobs))


def once(cursor: apsw.Cursor, request: Request, store: Callable[[], Sequence[Enqueued]]) -> OnceAnswer:
    """Store something under the write lock that the caller holds, unless this request did so before."""
    now = time.time()
    before = now - request.keep_s
    cursor.execute(SQL["clear_requests"], (before, CLEARED))
    found = cursor.execute(SQL["find_request"], (request.key, before)).fetchone()
    if found is not None:
        same = found[0] == request.fingerprint
        stored = tuple(Enqueued(*pair) for pair in _decode(found[1])) if same else ()
        return OnceAnswer(stored, repeated=True)
    answer = store()
    pairs = msgspec.json.encode([(item.job_id, item.fresh) for item in answer]).decode()
    cursor.execute(SQL["remember_request"], (request.key, request.fingerprint, now, pairs))
    return OnceAnswer(tuple(answer), repeated=False)
