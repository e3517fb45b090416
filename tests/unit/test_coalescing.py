"""Threads that enqueue at the same time share commits, and none waits for another's."""

import signal
import threading
from collections.abc import Callable, Sequence

import pytest

from unstuck.client.coalescing import Coalescer
from unstuck.store.records import Enqueued, NewJob

PATIENCE_S = 10.0


def job(number: int) -> NewJob:
    return NewJob(str(number), "q", b"")


def start(coalescer: Coalescer, number: int, returned: Callable[[int], object]) -> threading.Thread:
    def enqueue() -> None:
        coalescer.enqueue([job(number)])
        returned(number)

    thread = threading.Thread(target=enqueue, daemon=True)
    thread.start()
    return thread


class SlowDisk:
    """Writes that take until they are allowed to end, one permission each."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.batches: list[list[str]] = []

    def __call__(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        self.batches.append([job.task for job in jobs])
        self.begun.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
        return [Enqueued(int(job.task)) for job in jobs]


def test_who_has_its_answer_does_not_wait_for_the_next_commit() -> None:
    disk, answered = SlowDisk(), threading.Semaphore(0)
    coalescer = Coalescer(disk)
    first = start(coalescer, 0, lambda _: answered.release())
    assert disk.begun.acquire(timeout=PATIENCE_S)
    threads = [start(coalescer, number, lambda _: answered.release()) for number in (1, 2, 3)]
    while len(coalescer._waiting) < 3:
        pass
    disk.go_on.release()
    assert disk.begun.acquire(timeout=PATIENCE_S)
    late = start(coalescer, 4, lambda _: answered.release())
    while not coalescer._waiting:
        pass
    disk.go_on.release()
    # The write for the late one is under way and not allowed to end, and the others have their answers.
    assert disk.begun.acquire(timeout=PATIENCE_S)
    for _ in range(4):
        assert answered.acquire(timeout=PATIENCE_S)
    disk.go_on.release()
    for thread in (first, *threads, late):
        thread.join(PATIENCE_S)
    assert [sorted(batch) for batch in disk.batches] == [["0"], ["1", "2", "3"], ["4"]]


def test_ctrl_c_of_one_who_waits_takes_its_jobs_back_and_passes_the_pen_on() -> None:
    disk, answered = SlowDisk(), threading.Semaphore(0)
    coalescer = Coalescer(disk)
    first = start(coalescer, 0, lambda _: answered.release())
    assert disk.begun.acquire(timeout=PATIENCE_S)
    main = threading.get_ident()
    third: list[threading.Thread] = []

    def interrupt() -> None:
        # We are the first in line: whoever comes behind us must be written for all the same.
        while not coalescer._waiting:
            pass
        third.append(start(coalescer, 2, lambda _: answered.release()))
        while len(coalescer._waiting) < 2:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        coalescer.enqueue([job(1)])
    disk.go_on.release()
    disk.go_on.release()
    for thread in (first, *third):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert disk.batches == [["0"], ["2"]], "what was interrupted before it was written is not stored"
