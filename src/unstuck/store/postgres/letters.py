"""Keep where the answers to jobs go."""

from collections.abc import Sequence
from typing import Any

from unstuck.store.checks import check_ids
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.postgres.clients import optional
from unstuck.store.records import Letter


class LetterVerbs(Verbs):
    def letters(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[Letter]:
        check_ids((after_job_id,))
        return [Letter(*row) for row in self.read("letters", client=client, after=after_job_id, limit=limit)]

    def letter(self, job_id: int) -> Letter | None:
        check_ids((job_id,))
        rows = self.read("letter", job_id=job_id)
        return Letter(*rows[0]) if rows else None


def letter_columns(letters: Sequence[Letter | None]) -> dict[str, Any]:
    """Give the letters of a batch of jobs by column; those without one have no client."""
    return {
        "clients": arrays.byteas([None if one is None else one.client for one in letters]),
        "services": arrays.texts([None if one is None else one.service for one in letters]),
        "request_ids": arrays.texts([None if one is None else one.request_id for one in letters]),
        "letter_places": arrays.int4s([0 if one is None else one.place for one in letters]),
        "letters": arrays.int4s([1 if one is None else one.places for one in letters]),
        "correlations": optional(arrays.byteas, [None if one is None else one.correlation for one in letters]),
        "own_ids": optional(arrays.texts, [None if one is None else one.own_id for one in letters]),
        "notifies": arrays.bools([one is not None and one.notify for one in letters]),
    }


def letter_values(letter: Letter) -> dict[str, Any]:
    """Give the parameters of one letter."""
    return {
        "client": letter.client,
        "service": letter.service,
        "request_id": letter.request_id,
        "place": letter.place,
        "places": letter.places,
        "correlation": letter.correlation,
        "own_id": letter.own_id,
        "notify": letter.notify,
    }
