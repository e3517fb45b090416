"""Tell whoever else is concerned that attempts ended, in the transaction that ended them."""

from collections.abc import Sequence

import apsw
import msgspec

from unstuck.domain.states import AttemptState
from unstuck.store.sqlite.advancing import advance
from unstuck.store.sqlite.hooks import fire_hooks
from unstuck.store.sqlite.lines import leave_lines
from unstuck.store.sqlite.verbs import fetch

Ended = tuple[int, AttemptState]
"""A job, and how an attempt at it ended."""


def settled(cursor: apsw.Cursor, ended: Sequence[Ended]) -> set[str]:
    """Tell all who are concerned; give the queues in which jobs became ready by it."""
    if not ended:
        return set()
    return leave_lines(cursor, ended) | advance(cursor, ended) | fire_hooks(cursor, ended)


def tied_among(cursor: apsw.Cursor, job_ids: Sequence[int]) -> list[int]:
    """Give those whose end concerns others."""
    return [job_id for (job_id,) in fetch(cursor, "tied_among", (msgspec.json.encode(job_ids).decode(),))]
