"""Enqueue what follows the ends of other jobs."""

from collections.abc import Sequence

import apsw

from unstuck.domain.states import AttemptState


def fire_hooks(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    return set()
