"""Failpoints: how they are armed, and what a test hears of a point that was passed."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.points import PassedPoints

from unstuck import failpoints


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")
    assert not failpoints.active


def test_a_note_reports_each_passing_and_leaves_the_countdown_of_other_actions_alone(tmp_path: Path) -> None:
    signals, pid = PassedPoints(tmp_path), os.getpid()
    point = "turn.before_commit"
    failpoints.arm(signals.of(point, also=f"{point}=raise:3")["UNSTUCK_FAILPOINTS"])
    assert failpoints.active
    assert signals.count(point, pid) == 0
    for passed in (1, 2):
        failpoints.reached(point)
        signals.wait(point, pid, passed)
    with pytest.raises(failpoints.FailpointHit):
        failpoints.reached(point)
    failpoints.reached(point)
    failpoints.reached("turn.after_commit")
    assert signals.count(point, pid) == 4
    assert signals.count("turn.after_commit", pid) == 0
    assert signals.count(point, pid + 1) == 0


def test_a_point_hangs_as_long_as_its_file_is_there(tmp_path: Path) -> None:
    signals, point, hang = PassedPoints(tmp_path), "loop.step", tmp_path / "hang"
    failpoints.arm(signals.of(point, also=f"{point}=hang_if:{hang}")["UNSTUCK_FAILPOINTS"])
    failpoints.reached(point)
    hang.touch()
    thread = threading.Thread(target=failpoints.reached, args=(point,))
    thread.start()
    signals.wait(point, os.getpid(), 2)
    assert thread.is_alive()
    hang.unlink()
    thread.join()


@pytest.mark.parametrize(
    "text",
    [
        "no.such_point=kill",
        "turn.before_commit=dance",
        "turn.before_commit=kill,nix",
        "turn.before_commit=note",
        "turn.before_commit=hang_if",
    ],
)
def test_what_is_not_a_failpoint_is_refused(text: str) -> None:
    """A note needs the file that it is written to, a conditional hang the one that it looks for."""
    with pytest.raises(ValueError, match="unknown failpoint"):
        failpoints.arm(text)
