"""The doctor tells of clocks that were set and of times in which no one could keep watch, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import birth
from tests.support.doctor import CALM

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import gather
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.ledger.contract import Ledger

HOUR_S = 3600.0
Look = Callable[[], dict[str, Finding]]


@pytest.fixture
def look(ledger: Ledger, url: str) -> Look:
    """Ask the doctor, and return its findings by code."""
    settings = config.build({"url": url})

    def ask() -> Any:
        findings = examine(gather(ledger, settings))
        return {one.code.value: one for one in findings}

    return ask


@pytest.fixture
def watched(ledger: Ledger) -> None:
    """A worker that is well, and a reaper that keeps watch."""
    ledger.workers.register(birth("w1", **CALM))
    ledger.recovery.tick(Tick(None, 1.0, cause=Cause.START), "sweep", 60.0)


@pytest.mark.usefixtures("watched")
class TestClockSteps:
    def test_a_steady_clock_is_not_mentioned(self, ledger: Ledger, look: Look) -> None:
        ledger.recovery.tick(Tick(1.0, 1.0))
        assert look() == {}

    def test_a_clock_that_was_set_forward(self, ledger: Ledger, look: Look, meddler: Backdoor) -> None:
        meddler.move_watch(-HOUR_S)
        meddler.move_beats(-HOUR_S)
        ledger.recovery.tick(Tick(1.0, 1.0))
        found = look()["clock-step"]
        assert found.severity is Severity.WARNING
        assert found.facts["step_s"] == pytest.approx(HOUR_S, abs=5.0)
        assert "set forward by about" in found.what

    def test_a_clock_that_was_set_back(self, ledger: Ledger, look: Look, meddler: Backdoor) -> None:
        meddler.move_watch(HOUR_S)
        meddler.move_beats(HOUR_S)
        ledger.recovery.tick(Tick(1.0, 1.0))
        ledger.recovery.tick(Tick(1.0, 1.0))
        found = look()["clock-step"]
        assert found.severity is Severity.WARNING
        assert found.facts["step_s"] == pytest.approx(-HOUR_S, abs=5.0)
        assert "set back by about" in found.what

    def test_a_clock_that_was_set_wrong_and_mended(self, ledger: Ledger, look: Look, meddler: Backdoor) -> None:
        for moved_s in (-HOUR_S, HOUR_S):
            meddler.move_watch(moved_s)
            meddler.move_beats(moved_s)
            ledger.recovery.tick(Tick(1.0, 1.0))
        found = look()["clock-step"]
        assert [step["step_s"] for step in found.facts["steps"]] == [
            pytest.approx(-HOUR_S, abs=5.0),
            pytest.approx(HOUR_S, abs=5.0),
        ]

    def test_a_step_of_the_day_before_yesterday_is_forgotten(
        self, ledger: Ledger, look: Look, meddler: Backdoor
    ) -> None:
        meddler.move_watch(HOUR_S)
        ledger.recovery.tick(Tick(1.0, 1.0))
        assert "clock-step" in look()
        meddler.move_watch(-48 * HOUR_S)
        assert "clock-step" not in look()


@pytest.mark.usefixtures("watched")
class TestOutages:
    @pytest.mark.parametrize("cause", [Cause.OUTAGE, Cause.PAUSE, Cause.FAILOVER])
    def test_a_time_in_which_no_one_watched(self, ledger: Ledger, look: Look, meddler: Backdoor, cause: Cause) -> None:
        meddler.move_watch(-90.0)
        ledger.recovery.tick(Tick(None, 1.0, cause=cause))
        found = look()["ledger-outage"]
        assert found.severity is Severity.INFO
        assert found.facts["cause"] == cause
        assert found.facts["longest_s"] == pytest.approx(90.0, abs=5.0)

    def test_several_are_summed_up(self, ledger: Ledger, look: Look, meddler: Backdoor) -> None:
        for _ in range(3):
            meddler.move_watch(-40.0)
            ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
        found = look()["ledger-outage"]
        assert found.facts["count"] == 3
        assert found.facts["total_s"] == pytest.approx(120.0, abs=5.0)

    def test_reapers_that_were_all_stopped_for_the_night_are_no_outage(
        self, ledger: Ledger, look: Look, meddler: Backdoor
    ) -> None:
        meddler.move_watch(-8 * HOUR_S)
        ledger.recovery.tick(Tick(None, 1.0, cause=Cause.START))
        assert "ledger-outage" not in look()
