"""One call at a time uses a connection; urgent ones go first, and nobody waits for ever."""

import threading
import time

import pytest

from unstuck.domain.errors import LedgerUnavailable
from unstuck.store.postgres.call_lock import CallLock


def test_whoever_waits_too_long_is_told_that_nothing_was_sent() -> None:
    lock = CallLock("service", 0.05)
    held, done = threading.Event(), threading.Event()

    def keep() -> None:
        with lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=keep)
    thread.start()
    assert held.wait(10)
    with pytest.raises(LedgerUnavailable, match="Nothing was sent"), lock:
        pass
    with pytest.raises(LedgerUnavailable):
        lock.acquire_urgently()
    assert not lock.try_acquire()
    done.set()
    thread.join()
    with lock, lock:
        assert lock.try_acquire()
        lock.release()


def test_an_urgent_call_goes_before_all_that_wait_already() -> None:
    lock = CallLock("service", 10.0)
    order: list[str] = []
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            with lock, lock:
                order.append("other")
                time.sleep(0.005)

    others = [threading.Thread(target=keep_busy) for _ in range(6)]
    for other in others:
        other.start()
    before = []
    for _ in range(20):
        began = len(order)
        lock.acquire_urgently()
        before.append(len(order) - began)
        lock.release()
    ended.set()
    for other in others:
        other.join()
    # The one that has it, and at most one that took it in the same moment.
    assert max(before) <= 2, before
