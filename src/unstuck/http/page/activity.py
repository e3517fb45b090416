"""Turn what was counted minute by minute into the two charts of the first screen."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from unstuck.client.activity import Minute
from unstuck.http.page.charts import Series, bars, lines

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
