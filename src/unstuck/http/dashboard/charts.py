"""Draw bars, lines and the timeline of attempts as SVG. Pure.

The drawing is stretched to its place; words stand around it as HTML, so that they never are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from unstuck.client.metrics import Minute
from unstuck.domain.units import brief
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord

WIDTH = 600.0
HEIGHT = 120.0
GAP = 0.22
"""The share of a bar's place that is left free."""
MAX_SERIES = 3


@dataclass(frozen=True)
class Series:
    name: str
    values: Sequence[float | None]
    """One for each point in time; None is an honest gap."""


@dataclass(frozen=True)
class Chart:
    drawing: Markup
    top: str
    """What the upper edge stands for."""
    names: list[str]
    summary: str
    """The same in a sentence, for whoever cannot see it."""
    lines: bool
    empty: bool


def bars(series: Sequence[Series], times: Sequence[str], noun: str) -> Chart:
    """Stack whole numbers per moment, the first series at the bottom."""
    totals = [sum(values) for values in zip(*(_filled(one) for one in series), strict=True)]
    top = _round_up(max(totals, default=0.0), 4.0)
    place = WIDTH / max(1, len(totals))
    parts = [_grid()]
    for at, total in enumerate(totals):
        told = ", ".join(f"{one.values[at] or 0:,.0f} {one.name}" for one in series)
        pieces = []
        y = HEIGHT
        for number, one in enumerate(series[:MAX_SERIES], 1):
            height = (one.values[at] or 0.0) / top * HEIGHT
            y -= height
            if height:
                pieces.append(_rect(f"c{number}", at * place + place * GAP / 2, y, place * (1 - GAP), height))
        title = Markup("<title>{}: {}</title>").format(times[at], told)
        area = _rect("hit", at * place, 0.0, place, HEIGHT)
        parts.append(Markup("<g>{}{}{}</g>").format(title, area, Markup().join(pieces)) if total else Markup())
    whole = sum(totals)
    summary = f"{whole:,.0f} {noun} in {len(totals)} minutes, at most {max(totals, default=0):,.0f} in one."
    return Chart(_svg(parts, summary), f"{top:,.0f}", [one.name for one in series], summary, False, not whole)


def lines(series: Sequence[Series], times: Sequence[str], noun: str) -> Chart:
    """Draw durations as lines on a scale of their own; gaps stay gaps."""
    seen = [value for one in series for value in one.values if value is not None]
    top = _nice_duration(max(seen, default=0.0))
    step = WIDTH / max(1, len(times) - 1)
    parts = [_grid()]
    for number, one in enumerate(series[:MAX_SERIES], 1):
        for run in _runs(one.values):
            points = [(at * step, HEIGHT - min(value / top, 1.0) * HEIGHT) for at, value in run]
            if len(points) == 1:
                # A line needs two ends to be seen.
                points.append((min(points[0][0] + step * 0.5, WIDTH), points[0][1]))
            path = " ".join(f"{'M' if at == 0 else 'L'}{x:.1f} {y:.1f}" for at, (x, y) in enumerate(points))
            parts.append(Markup('<path class="l{}" d="{}"/>').format(number, path))
    last = [f"{one.name} {brief(value)}" for one in series if (value := _last(one.values)) is not None]
    summary = f"{noun}: {', '.join(last)} lately." if last else f"{noun}: nothing was measured."
    return Chart(_svg(parts, summary), brief(top), [one.name for one in series], summary, True, not seen)


def _svg(parts: Sequence[Markup], summary: str) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {:.0f} {:.0f}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, escape(summary), Markup().join(parts))


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        kind, x, y, width, height
    )


def _grid() -> Markup:
    levels = [HEIGHT * share for share in (0.0, 0.5, 1.0)]
    return Markup().join(
        Markup('<line class="grid" x1="0" x2="{:.0f}" y1="{:.1f}" y2="{:.1f}"/>').format(WIDTH, y, y) for y in levels
    )


def _filled(one: Series) -> list[float]:
    return [value or 0.0 for value in one.values]


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for at, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _round_up(value: float, least: float) -> float:
    """Give the next of 1, 2, 4, 5, 8 times a power of ten: a scale that can be read at half of it too."""
    value = max(value, least)
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)


def _nice_duration(value_s: float) -> float:
    steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
    return next((float(step) for step in steps if step >= value_s), value_s)


MINUTES = 60


class Charts:
    """The charts, drawn anew when something was counted, and not for everybody who looks."""

    def __init__(self) -> None:
        self._drawn: tuple[Sequence[Minute], dict[str, Any]] | None = None

    def of(self, minutes: Sequence[Minute]) -> dict[str, Any]:
        drawn = self._drawn
        if drawn is None or drawn[0] is not minutes:
            drawn = self._drawn = (minutes, charts_of(minutes))
        return drawn[1]


def charts_of(minutes: Sequence[Minute]) -> dict[str, Any]:
    times = [datetime.fromtimestamp(minute.at, UTC).strftime("%H:%M UTC") for minute in minutes]
    ended = bars(
        [
            Series("succeeded", [minute.ended.get("succeeded", 0) for minute in minutes]),
            Series(
                "failed", [minute.ended.get("failed", 0) + minute.ended.get("quarantined", 0) for minute in minutes]
            ),
            Series("cancelled", [minute.ended.get("cancelled", 0) for minute in minutes]),
        ],
        times,
        "jobs ended",
    )
    # The minute that is still going on has too little in it to stand beside the others.
    whole = minutes[:-1]
    latency = lines(
        [
            Series("wait p95", [minute.wait_p95_s for minute in whole]),
            Series("run p95", [minute.run_p95_s for minute in whole]),
            Series("run median", [minute.run_p50_s for minute in whole]),
        ],
        times[:-1],
        "Latency",
    )
    return {"ended": ended, "latency": latency}


TIMELINE_WIDTH = 1000.0
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
    scale = TIMELINE_WIDTH / (ended - began)
    bars = []
    for number, one in enumerate(attempts, 1):
        from_at = one.started_at or one.claimed_at or began
        to_at = one.ended_at or now_s
        width = max((to_at - from_at) * scale, LEAST)
        x = min(max((from_at - began) * scale, 0.0), TIMELINE_WIDTH - width)
        bars.append(Bar(number, one, round(x, 1), round(width, 1), from_at, one.ended_at))
    return Timeline(bars, began, ended)
