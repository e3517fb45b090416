"""What a watchdog asks of the ledger and writes into it, on both databases."""

from tests.contract.hands import birth, put

from unstuck.config import Settings
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.store.contract import Ledger
from unstuck.worker.herald import Herald
from unstuck.worker.movement import Movement
from unstuck.worker.watchdog import Watchdog, Watched


def watchdog(url: str) -> Watchdog:
    watched = Watched(Movement(), Movement(), Movement(), lambda: False, lambda: False)
    return Watchdog("w1", Settings(url=url), watched, Herald())


def test_the_ledger_is_asked_without_taking_anything(ledger: Ledger, url: str) -> None:
    ledger.register(birth())
    job = put(ledger)
    assert watchdog(url)._ledger_answers()
    record = ledger.job(job)
    assert record is not None
    assert record.state is JobState.PENDING


def test_a_ledger_that_is_away_is_no_reason_to_die() -> None:
    assert not watchdog("sqlite:////nowhere/at/all/jobs.db")._ledger_answers()
    assert not watchdog("postgresql://127.0.0.1:9/nobody")._ledger_answers()


def test_the_last_words_stand_in_the_ledger(ledger: Ledger, url: str) -> None:
    ledger.register(birth())
    watchdog(url)._last_words("alive but doing nothing: its floor has not gone round for 60s")
    [worker] = ledger.workers()
    assert worker.state is WorkerState.DEAD
    assert worker.verdict is not None
    assert (worker.verdict.detector, worker.verdict.by) == (Detector.WATCHDOG, "w1")
    assert any("its floor has not gone round" in event.message for event in ledger.events(worker_id="w1"))
