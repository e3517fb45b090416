"""Find out, from a second connection, which sessions hold up a statement that waits for a lock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from unstuck.domain.durations import brief
from unstuck.domain.errors import LedgerError
from unstuck.store.postgres.lanes import Lane, Row

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

    def __init__(self, lane: Lane, every_s: float) -> None:
        self._lane = lane
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
                self._seen = self._lane.ask(_BLOCKERS, values) or self._seen
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
