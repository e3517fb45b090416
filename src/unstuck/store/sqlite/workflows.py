"""Keep workflows: move them on when one of their jobs ends."""

from collections.abc import Sequence

import apsw

from unstuck.domain.states import AttemptState


def reopen(cursor: apsw.Cursor, job_id: int) -> None:
    return


def inputs(cursor: apsw.Cursor, job_ids: Sequence[int]) -> dict[int, bytes]:
    return {}


def advance(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    return set()
