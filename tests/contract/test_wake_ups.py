"""The bell: heard at once, by those it concerns, and never in anybody's way."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.builders import birth
from tests.support.fleet import TIMEOUT_S

from unstuck.config import Settings
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger, Listener
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.notifier import MAX_PAYLOAD_BYTES, payloads

LONG_S = 20.0
FOR_EVER_S = 3600.0


def assert_returns(call: Callable[[], object]) -> None:
    """Check that a call comes back by itself, however long this machine needs for it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.fixture
def bell(ledger: Ledger, w1: str):  # type: ignore[no-untyped-def]
    bell = ledger.workers.listen("w1")
    yield bell
    bell.close()


def heard(bell: Listener, word: str) -> bool:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if word in bell.wait(LONG_S):
            return True
    return False


@pytest.mark.parametrize("word", ["queue:default", "worker:w1", "workers"])
def test_a_word_that_concerns_the_worker_is_heard(
    ledger: Ledger, bell: Listener, open_again: OpenLedger, word: str
) -> None:
    open_again().notify([word])
    assert heard(bell, word)


def test_words_that_came_before_the_wait_are_not_lost_and_come_together(ledger: Ledger, bell: Listener) -> None:
    ledger.notify(["queue:default", "workers"])
    ledger.notify(["worker:w1"])
    words: set[str] = set()
    deadline = time.monotonic() + LONG_S
    while words != {"queue:default", "workers", "worker:w1"}:
        assert time.monotonic() < deadline, words
        words |= bell.wait(1.0)


def test_silence_ends_when_the_time_is_up(bell: Listener) -> None:
    before = time.monotonic()
    assert bell.wait(0.05) == frozenset()
    assert time.monotonic() - before >= 0.04
    assert bell.wait(0.0) == frozenset()


def test_a_waiting_worker_can_be_interrupted(bell: Listener) -> None:
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        bell.wait(FOR_EVER_S)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waiting.wait()
    bell.interrupt()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_an_interrupt_before_the_wait_is_not_lost(bell: Listener) -> None:
    bell.interrupt()
    assert_returns(lambda: bell.wait(FOR_EVER_S))


def test_ringing_where_nobody_listens_is_no_error(ledger: Ledger) -> None:
    ledger.workers.register(birth("deaf"))
    ledger.notify(["queue:default", "worker:deaf", "workers"])
    ledger.notify([])


def test_a_full_bell_blocks_nobody(ledger: Ledger, bell: Listener) -> None:
    def ring() -> None:
        for _ in range(300):
            ledger.notify(["queue:default"])

    assert_returns(ring)
    assert heard(bell, "queue:default")


def test_the_worker_can_beat_while_it_waits_for_the_bell(ledger: Ledger, bell: Listener) -> None:
    thread = threading.Thread(target=bell.wait, args=(FOR_EVER_S,))
    thread.start()
    assert ledger.workers.beat(Heartbeat("w1", 0, 0)).state is WorkerState.ACTIVE
    assert thread.is_alive()
    bell.interrupt()
    thread.join()


def test_a_ring_that_arrives_during_a_beat_is_heard(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
    bell = pg_ledger.workers.listen("w1")
    client = PostgresLedger(Settings(url=pg_url))
    client.notify(["queue:default"])
    # The notify comes with the answer to the beat, before anybody waits for it.
    pg_ledger.workers.beat(Heartbeat("w1", 0, 0))
    assert bell.wait(LONG_S) == frozenset({"queue:default"})
    client.close()
    bell.close()


def test_only_what_concerns_the_worker_wakes_it(pg_ledger: PostgresLedger) -> None:
    pg_ledger.workers.register(birth("w1"))
    bell = pg_ledger.workers.listen("w1")
    pg_ledger.notify(["queue:other", "worker:w2", "queue:default", "worker:w1", "workers"])
    assert bell.wait(LONG_S) == frozenset({"queue:default", "worker:w1", "workers"})
    bell.close()


def test_with_notify_off_nobody_listens_and_nothing_is_rung(pg_url: str) -> None:
    ledger = PostgresLedger(Settings(url=pg_url, notify=False))
    ledger.migrate()
    ledger.workers.register(birth("w1"))
    bell = ledger.workers.listen("w1")
    ledger.notify(["queue:default"])
    assert bell.wait(0.05) == frozenset()
    bell.close()
    ledger.close()


def test_rings_of_many_threads_are_all_heard(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1", queues=tuple(f"q{n}" for n in range(200))))
    bell = pg_ledger.workers.listen("w1")
    client = PostgresLedger(Settings(url=pg_url))

    def ring(first: int) -> None:
        for number in range(first, first + 25):
            client.notify([f"queue:q{number}"])

    threads = [threading.Thread(target=ring, args=(first,)) for first in range(0, 200, 25)]
    for thread in threads:
        thread.start()
    heard: set[str] = set()
    while len(heard) < 200:
        words = bell.wait(LONG_S)
        assert words, f"only {len(heard)} of 200 rings were heard"
        heard |= words
    for thread in threads:
        thread.join()
    client.close()
    bell.close()


@pytest.mark.parametrize("count", [1, 3, 2000])
def test_words_are_packed_into_payloads_that_fit(count: int) -> None:
    words = {f"queue:ä{number}" for number in range(count)}
    packed = payloads(words)
    assert all(len(part.encode()) <= MAX_PAYLOAD_BYTES for part in packed)
    assert {word for part in packed for word in part.split("\n")} == words


def test_a_word_too_long_for_any_payload_is_left_out() -> None:
    assert payloads({"x" * 10_000}) == []
