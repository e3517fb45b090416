"""Decide whether anybody looks for the dead."""

from collections.abc import Collection

from unstuck.domain.durations import brief

ROUNDS_MISSED = 10
PATIENCE_S = 5.0
NO_REAPER = "No reaper is running"
NO_REAPER_CURE = "Start a worker without --no-reaper, `unstuck serve`, or `unstuck reaper` as a service."


def is_unswept(unswept_s: float | None, interval_s: float, ages_s: Collection[float]) -> bool:
    """Say whether rounds are missing. `unswept_s` is the time since the last one's ticket ran out (None: there never
    was one), `ages_s` how long the living workers have lived."""
    patience_s = ROUNDS_MISSED * interval_s + PATIENCE_S
    # A fleet that was just started had no time for a round yet.
    if max(ages_s, default=patience_s) < patience_s:
        return False
    return unswept_s is None or unswept_s >= patience_s


def why_unswept(unswept_s: float | None, interval_s: float) -> str:
    since = "ever" if unswept_s is None else f"for {brief(unswept_s)}"
    return (
        f"Nobody has taken the sweep ticket {since}; a round is due every {brief(interval_s)}. Until somebody does, "
        "the dead are not found, their jobs are not settled, and scheduled jobs may stay where they are."
    )
