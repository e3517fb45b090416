"""The bell shares the service connection with beats and loses nothing to them."""

import threading

import pytest
from tests.contract.hands import birth

from unstuck.config import Settings
from unstuck.store.postgres.bell import MAX_PAYLOAD_BYTES, payloads
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.records import Pulse


def test_a_ring_that_arrives_during_a_beat_is_heard(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    bell = pg_ledger.listen("w1")
    client = PostgresLedger(Settings(url=pg_url))
    client.ring(["queue:default"])
    # The notify comes with the answer to the beat, before anybody waits for it.
    pg_ledger.beat(Pulse("w1", 0, 0))
    assert bell.wait(10) == frozenset({"queue:default"})
    client.close()
    bell.close()


def test_only_what_concerns_the_worker_wakes_it(pg_ledger: PostgresLedger) -> None:
    pg_ledger.register(birth("w1"))
    bell = pg_ledger.listen("w1")
    pg_ledger.ring(["queue:other", "worker:w2", "queue:default", "worker:w1", "workers"])
    assert bell.wait(10) == frozenset({"queue:default", "worker:w1", "workers"})
    bell.close()


def test_with_notify_off_nobody_listens_and_nothing_is_rung(pg_url: str) -> None:
    ledger = PostgresLedger(Settings(url=pg_url, notify=False))
    ledger.migrate()
    ledger.register(birth("w1"))
    bell = ledger.listen("w1")
    ledger.ring(["queue:default"])
    assert bell.wait(0.05) == frozenset()
    bell.close()
    ledger.close()


def test_rings_of_many_threads_are_all_heard(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1", queues=tuple(f"q{n}" for n in range(200))))
    bell = pg_ledger.listen("w1")
    client = PostgresLedger(Settings(url=pg_url))

    def ring(first: int) -> None:
        for number in range(first, first + 25):
            client.ring([f"queue:q{number}"])

    threads = [threading.Thread(target=ring, args=(first,)) for first in range(0, 200, 25)]
    for thread in threads:
        thread.start()
    heard: set[str] = set()
    while len(heard) < 200:
        words = bell.wait(10)
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
