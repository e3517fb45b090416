"""Keep the book of foreign workers: those that come through another door than Python's own."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck.domain.states import WorkerState
from unstuck.store.postgres import arrays, errors
from unstuck.store.postgres.bell import PostgresBell
from unstuck.store.postgres.flights import Flight, Texts, launch
from unstuck.store.postgres.lanes import Row
from unstuck.store.postgres.rows import worker_record
from unstuck.store.postgres.workers import WorkerVerbs
from unstuck.store.records import BeatAnswer, Fate, ForeignPulse, WorkerRecord, read_fate

AS_IT_WAS = -1


class ForeignVerbs(WorkerVerbs):
    def foreign_worker(self, worker_id: str) -> WorkerRecord | None:
        rows = self.read("foreign_worker", worker_id=worker_id)
        return worker_record(rows[0]) if rows else None

    def foreign_worker_named(self, name: str) -> WorkerRecord | None:
        rows = self.read("foreign_worker_named", name=name)
        return worker_record(rows[0]) if rows else None

    def living_python_worker(self, name: str) -> str | None:
        rows = self.read("living_python_worker", name=name)
        return str(rows[0][0]) if rows else None

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        rows = self.read(
            "fates",
            job_ids=arrays.int8s([job_id for job_id, _ in attempts]),
            tokens=arrays.int8s([token for _, token in attempts]),
        )
        return [read_fate(row) for row in rows]

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        ids = arrays.texts(sorted(worker_ids))
        return {worker_id for (worker_id,) in self.turn_lane.ask(self.sql["blocked_workers"], {"ids": ids})}

    def beat_foreign(self, pulses: Sequence[ForeignPulse]) -> list[BeatAnswer]:
        # A beat may be given twice; what it adds to the count of settled jobs is for people.
        return beat_answers(self.beats_lane.ask(self.sql["beat_foreign"], beat_values(pulses)))

    def launch_beats(self, pulses: Sequence[ForeignPulse]) -> Flight[list[BeatAnswer]] | None:
        return launch(
            self.beats_lane, self.sql["beat_foreign_in_flight"], [*beat_values(pulses).values()], _answers_read
        )

    def overhear(self) -> PostgresBell:
        return PostgresBell(self._bell_source(), self.schema, lambda word: True)


def beat_values(pulses: Sequence[ForeignPulse]) -> dict[str, Any]:
    """Give the parameters of a beat for many."""
    try:
        metadata = [None if one.metadata is None else msgspec.json.encode(one.metadata).decode() for one in pulses]
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None
    return {
        "worker_ids": arrays.texts([one.worker_id for one in pulses]),
        "running": arrays.int8s([AS_IT_WAS if one.running is None else one.running for one in pulses]),
        "settled": arrays.int8s([one.settled for one in pulses]),
        "metadata": arrays.texts(metadata),
    }


def _answers_read(rows: list[Texts]) -> list[BeatAnswer]:
    return beat_answers(
        [
            (n, _text(state), suspect == b"t", _text(request), _numbers(ids), _numbers(tokens), off == b"t")
            for n, state, suspect, request, ids, tokens, off in rows
        ]
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _numbers(value: bytes | None) -> list[int]:
    """Read an array of numbers as the server writes it: {1,2}."""
    inside = (value or b"{}")[1:-1]
    return [int(one) for one in inside.split(b",")] if inside else []


def beat_answers(rows: list[Row]) -> list[BeatAnswer]:
    """Read what they are told, in their order."""
    return [
        BeatAnswer(WorkerState(state), was_suspect, request, tuple(zip(ids or (), tokens or (), strict=True)), off)
        for _, state, was_suspect, request, ids, tokens, off in rows
    ]
