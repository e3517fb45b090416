"""The heartbeat thread when locks or outages are in its way: it comes back in time, and says it once."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fleet import wait_for

from unstuck.domain.errors import LedgerBusy, LedgerUnavailable
from unstuck.domain.states import WorkerState
from unstuck.metrics.tallies import Tallies
from unstuck.store.bookkeeping import Bookkeeper
from unstuck.store.records import BeatAnswer, Promoted, Pulse
from unstuck.worker.heartbeat import Heartbeat
from unstuck.worker.mailbox import Mailbox


class Bell:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait(self, timeout_s: float) -> frozenset[str]:
        self._rung.wait(timeout_s)
        self._rung.clear()
        return frozenset()

    def interrupt(self) -> None:
        self._rung.set()

    def close(self) -> None:
        self._rung.set()


class Ledger:
    """What the thread calls, with trouble on request."""

    def __init__(self) -> None:
        self.beats: list[float] = []
        self.listened = 0
        self.trouble: Exception | None = None
        self.busy_promotions = 0
        self.promoted = 0
        self.next_due_in_s: float | None = None

    def listen(self, _worker_id: str) -> Bell:
        self.listened += 1
        return Bell()

    def beat(self, _pulse: Pulse) -> BeatAnswer:
        self.beats.append(time.monotonic())
        if self.trouble is not None:
            raise self.trouble
        return BeatAnswer(WorkerState.ACTIVE, False, None, (), False)

    def promote_due(self, _limit: int) -> Promoted:
        if self.busy_promotions:
            self.busy_promotions -= 1
            raise LedgerBusy("canceling statement due to lock timeout")
        self.promoted += 1
        return Promoted(0, frozenset(), self.next_due_in_s)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Any:
    ledger, mailbox = Ledger(), Mailbox()
    thread = Heartbeat(
        ledger,  # type: ignore[arg-type]
        "w",
        mailbox,
        interval_s=0.1,
        queues=frozenset(),
        report=lambda: Pulse("w", 0, 0),
        on_workers=lambda: None,
        books=Bookkeeper(ledger, Tallies(), 3600.0),  # type: ignore[arg-type]
    )
    thread.start()
    yield SimpleNamespace(ledger=ledger, thread=thread)
    thread.stop(10)
    mailbox.close()


def test_after_an_outage_the_pauses_are_short_beside_the_interval(made: Any) -> None:
    made.ledger.trouble = LedgerUnavailable("away")
    wait_for(lambda: len(made.ledger.beats) >= 8, "several tries")
    tries = made.ledger.beats[:8]
    assert tries[-1] - tries[0] < 1.0, "seven pauses of at most a quarter of the interval"


def test_a_lock_in_the_way_of_a_heartbeat_costs_neither_the_connection_nor_the_wake_ups(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "unstuck.worker")
    made.ledger.trouble = LedgerBusy("canceling statement due to lock timeout")
    wait_for(lambda: len(made.ledger.beats) >= 5, "several tries")
    assert made.ledger.listened == 1
    said = [one.getMessage() for one in caplog.records if one.name == "unstuck.worker"]
    assert said == ["A lock holds up the heartbeat; trying again"]


def test_a_lock_in_the_way_of_due_jobs_holds_up_no_heartbeat(made: Any) -> None:
    made.ledger.busy_promotions = 3
    made.thread.promote_in(0.0)
    wait_for(lambda: made.ledger.promoted == 1, "the promise to be kept at last")
    assert made.ledger.listened == 1
    assert len(made.ledger.beats) >= 1


def test_due_jobs_that_an_open_transaction_has_locked_are_not_asked_for_without_a_pause(made: Any) -> None:
    made.ledger.next_due_in_s = 0.0
    made.thread.promote_in(0.0)
    wait_for(lambda: len(made.ledger.beats) >= 8, "several heartbeats")
    assert 2 <= made.ledger.promoted <= 20
    # A turn that finds them due as well changes nothing about that.
    for _ in range(100):
        made.thread.promote_in(0.0)
    assert made.ledger.promoted <= 22
    made.ledger.next_due_in_s = None
    asked = made.ledger.promoted
    wait_for(lambda: made.ledger.promoted > asked, "the promise to be kept at last")
