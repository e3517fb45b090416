"""Write numbers, times and sizes for people who look at the page."""

import json
import re
import time
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from unstuck.domain.durations import brief

MAX_JSON_CHARS = 20_000

_TICKS = re.compile(r"`([^`\n]{1,300})`")


def ago(at: float | None, now_s: float | None = None) -> str:
    """Say how long ago something was, or in how long it will be."""
    if at is None:
        return "–"
    age_s = (time.time() if now_s is None else now_s) - at
    if age_s < -1:
        return f"in {coarse(-age_s)}"
    return "just now" if age_s < 1 else f"{coarse(age_s)} ago"


def coarse(value_s: float | None) -> str:
    """Write an age without digits that nobody reads: 12s, 5m, 3h20m."""
    if value_s is None:
        return "–"
    if value_s < 1:
        return "0s"
    if value_s < 60:
        return f"{value_s:.0f}s"
    return brief(float(round(value_s))) if value_s < 600 else brief(round(value_s / 60) * 60.0)


def took(from_at: float | None, to_at: float | None) -> str:
    if from_at is None or to_at is None:
        return "–"
    return brief(max(0.0, to_at - from_at))


def clock(at: float | None) -> str:
    """Write a time of day with its date, in UTC: the page of a server is read from anywhere."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def count(value: int, noun: str) -> str:
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def pretty_json(value: Any) -> str:
    """Write a value as indented JSON, cut where it is longer than anybody reads."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    if len(text) <= MAX_JSON_CHARS:
        return text
    return f"{text[:MAX_JSON_CHARS]}\n… ({len(text):,} characters in all)"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def ticks(sentence: str) -> Markup:
    """Escape a sentence, and set what stands `between ticks` as code."""
    return Markup(_TICKS.sub(r"<code>\1</code>", str(escape(sentence))))
