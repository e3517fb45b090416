"""Keep what jobs write down on their way, and the signals that they are sent."""

from collections.abc import Sequence

import apsw

from unstuck.store.records import Entry, FollowUp


def write_entries(cursor: apsw.Cursor, worker_id: str, entries: Sequence[Entry]) -> set[tuple[int, int]]:
    """Write entries of attempts that this worker still runs; give the (job_id, token) of those that it does not."""
    return set()


def journals(cursor: apsw.Cursor, job_ids: Sequence[int]) -> dict[int, bytes]:
    return {}


def has_signal(cursor: apsw.Cursor, job_id: int, name: str) -> bool:
    return False


def follow_up(cursor: apsw.Cursor, follow: Sequence[FollowUp], ended: set[int]) -> set[str]:
    """Enqueue what ended attempts (by token) asked for; give the queues."""
    return set()
