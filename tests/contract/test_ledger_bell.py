"""The bell: heard at once, by those it concerns, and never in anybody's way."""

import threading
import time

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth

from unstuck.domain.states import WorkerState
from unstuck.store.contract import Bell, Ledger
from unstuck.store.records import Pulse

LONG_S = 20.0


@pytest.fixture
def bell(ledger: Ledger, w1: str):  # type: ignore[no-untyped-def]
    bell = ledger.listen("w1")
    yield bell
    bell.close()


def heard(bell: Bell, word: str) -> bool:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if word in bell.wait(LONG_S):
            return True
    return False


@pytest.mark.parametrize("word", ["queue:default", "worker:w1", "workers"])
def test_a_word_that_concerns_the_worker_is_heard(
    ledger: Ledger, bell: Bell, open_again: OpenLedger, word: str
) -> None:
    open_again().ring([word])
    assert heard(bell, word)


def test_words_that_came_before_the_wait_are_not_lost_and_come_together(ledger: Ledger, bell: Bell) -> None:
    ledger.ring(["queue:default", "workers"])
    ledger.ring(["worker:w1"])
    words: set[str] = set()
    deadline = time.monotonic() + LONG_S
    while words != {"queue:default", "workers", "worker:w1"}:
        assert time.monotonic() < deadline, words
        words |= bell.wait(1.0)


def test_silence_ends_when_the_time_is_up(bell: Bell) -> None:
    before = time.monotonic()
    assert bell.wait(0.05) == frozenset()
    assert time.monotonic() - before >= 0.04
    assert bell.wait(0.0) == frozenset()


def test_a_waiting_worker_can_be_interrupted(bell: Bell) -> None:
    waiting = threading.Event()
    ended = threading.Event()

    def wait() -> None:
        waiting.set()
        bell.wait(LONG_S)
        ended.set()

    thread = threading.Thread(target=wait)
    before = time.monotonic()
    thread.start()
    waiting.wait()
    bell.interrupt()
    assert ended.wait(LONG_S / 2)
    thread.join()
    assert time.monotonic() - before < LONG_S / 2


def test_an_interrupt_before_the_wait_is_not_lost(bell: Bell) -> None:
    bell.interrupt()
    before = time.monotonic()
    bell.wait(LONG_S)
    assert time.monotonic() - before < LONG_S / 2


def test_ringing_where_nobody_listens_is_no_error(ledger: Ledger) -> None:
    ledger.register(birth("deaf"))
    ledger.ring(["queue:default", "worker:deaf", "workers"])
    ledger.ring([])


def test_a_full_bell_blocks_nobody(ledger: Ledger, bell: Bell) -> None:
    before = time.monotonic()
    for _ in range(300):
        ledger.ring(["queue:default"])
    assert time.monotonic() - before < LONG_S
    assert heard(bell, "queue:default")


def test_the_worker_can_beat_while_it_waits_for_the_bell(ledger: Ledger, bell: Bell) -> None:
    thread = threading.Thread(target=bell.wait, args=(LONG_S,))
    thread.start()
    before = time.monotonic()
    assert ledger.beat(Pulse("w1", 0, 0)).state is WorkerState.ACTIVE
    assert time.monotonic() - before < LONG_S / 2
    bell.interrupt()
    thread.join()
