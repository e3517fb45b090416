"""Keep where the answers to jobs go."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.store.checks import check_ids
from unstuck.store.records import Letter
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.verbs import SQL, Verbs


class LetterVerbs(Verbs):
    def letters(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[Letter]:
        check_ids((after_job_id,))
        with self.db.read() as cursor:
            return [_letter(row) for row in cursor.execute(SQL["letters"], (client, after_job_id, limit))]

    def letter(self, job_id: int) -> Letter | None:
        check_ids((job_id,))
        with self.db.read() as cursor:
            row = cursor.execute(SQL["letter"], (job_id,)).fetchone()
        return None if row is None else _letter(row)


def store_letters(cursor: apsw.Cursor, letters: Iterable[tuple[int, Letter]]) -> None:
    """Write the letters of these jobs, inside a write."""
    rows = []
    for job_id, letter in letters:
        refuse_nul(letter.service, letter.request_id, letter.own_id)
        origin = (letter.client, letter.service, letter.request_id, letter.place, letter.places)
        rows.append((job_id, *origin, letter.correlation, letter.own_id, letter.notify))
    cursor.executemany(SQL["store_letter"], rows)


def answer_letters(cursor: apsw.Cursor, job_ids: Sequence[int]) -> None:
    """Mark them as answered, inside a write."""
    cursor.execute(SQL["answer_letters"], (msgspec.json.encode(job_ids).decode(), time.time()))


def _letter(row: tuple[Any, ...]) -> Letter:
    return Letter(*(*row[:7], bool(row[7]), *row[8:]))
