"""Let so many jobs of one line be at work at once as may be."""

from collections.abc import Sequence

import apsw

from unstuck.domain.states import AttemptState


def admit(cursor: apsw.Cursor, lines: set[str]) -> set[str]:
    return set()


def leave_lines(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    return set()
