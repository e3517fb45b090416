"""Durations are read as people write them, and written as people say them."""

import contextlib
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.domain.durations import MAX_DURATION_S, brief, seconds
from unstuck.domain.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "expected_s"),
    [
        ("30s", 30),
        ("5m", 300),
        ("2h30m", 9000),
        ("2h 30m", 9000),
        (" 1D ", 86400),
        ("1w", 604800),
        ("350ms", 0.35),
        ("1.5h", 5400),
        ("90", 90),
        ("0.25", 0.25),
        (0, 0),
        (12, 12),
        (0.5, 0.5),
        (timedelta(minutes=2), 120),
        (timedelta(milliseconds=250), 0.25),
    ],
)
def test_every_way_of_writing_a_duration(written: object, expected_s: float) -> None:
    assert seconds(written) == pytest.approx(expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        " ",
        "5x",
        "m",
        "5 minutes",
        "1h-5m",
        "-5s",
        "--",
        "5m5",
        True,
        False,
        None,
        [],
        "nan",
        "inf",
        math.nan,
        math.inf,
        -1,
        -0.001,
        timedelta(seconds=-1),
        MAX_DURATION_S + 1,
        "11w" * 60,
        b"5s",
    ],
)
def test_what_is_no_duration_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout must be"):
        seconds(wrong, "heartbeat_timeout")  # type: ignore[arg-type]


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="like '30s', '5m'"):
        seconds("soon")


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [
        (0.35, "350ms"),
        (0, "0ms"),
        (1, "1s"),
        (60, "60s"),
        (100, "100s"),
        (119.4, "119s"),
        (120, "2m"),
        (90 * 60, "1h30m"),
        (3600, "1h"),
        (86400 + 3600 + 60, "1d1h"),
        (7 * 86400, "7d"),
    ],
)
def test_durations_are_written_briefly(value_s: float, expected: str) -> None:
    assert brief(value_s) == expected


@given(st.integers(min_value=1, max_value=int(MAX_DURATION_S)))
def test_what_is_written_can_be_read_again_within_its_precision(value_s: int) -> None:
    again_s = seconds(brief(value_s))
    assert abs(again_s - value_s) <= max(0.5, value_s * 0.05)


@given(st.text(max_size=20))
def test_any_text_gives_seconds_or_a_clear_refusal(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert 0 <= seconds(text) <= MAX_DURATION_S
