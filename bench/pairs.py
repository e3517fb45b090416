"""Compare two things on a noisy machine: in neighbouring turns, by the median of the pairs, with its interval."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """By how many percent the second of a pair costs more: the median, and the interval that holds it (95 %)."""

    middle: float
    low: float
    high: float


def difference(before: Sequence[float], after: Sequence[float], *, times: float = 1.0) -> Difference:
    """Compare pairs. `times` divides: where the effect was made so many times as large as it is in life."""
    each = [(b / a - 1) * 100 / times for a, b in zip(before, after, strict=True)]
    # From one seed: who runs it twice on the same figures reads the same interval.
    draw = random.Random(len(each))
    medians = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Difference(statistics.median(each), medians[tail], medians[-1 - tail])


def order(turns: int) -> list[int]:
    """Give who goes in each turn, 0 or 1: who goes first changes, since the second finds warmer caches."""
    return [(turn + turn // 2) % 2 for turn in range(2 * turns)]
