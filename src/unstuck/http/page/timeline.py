"""Lay the attempts of a job out in time: where it waited, where it ran, how each try ended. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from unstuck.store.records import AttemptRecord, JobRecord

WIDTH = 1000.0
LEAST = 6.0
"""An attempt of a millisecond must still be seen."""


@dataclass(frozen=True)
class Bar:
    number: int
    attempt: AttemptRecord
    x: float
    width: float
    began_at: float
    ended_at: float | None


@dataclass(frozen=True)
class Timeline:
    bars: list[Bar]
    from_at: float
    to_at: float


def timeline(job: JobRecord, attempts: Sequence[AttemptRecord], now_s: float) -> Timeline:
    began = job.enqueued_at
    ends = [one.ended_at or now_s for one in attempts]
    ended = max([job.finished_at or now_s, *ends, began + 0.001])
    scale = WIDTH / (ended - began)
    bars = []
    for number, one in enumerate(attempts, 1):
        from_at = one.started_at or one.claimed_at or began
        to_at = one.ended_at or now_s
        width = max((to_at - from_at) * scale, LEAST)
        x = min(max((from_at - began) * scale, 0.0), WIDTH - width)
        bars.append(Bar(number, one, round(x, 1), round(width, 1), from_at, one.ended_at))
    return Timeline(bars, began, ended)
