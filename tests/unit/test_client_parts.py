"""What many threads of a client share: the one who writes for all, the one who waits for all, the one who rings."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from tests.fleet import wait_for

from unstuck.client.coalescing import Coalescer
from unstuck.domain.errors import JobNotFound, LedgerUnavailable, UncertainCommit
from unstuck.domain.states import JobState
from unstuck.notify.ringer import Ringer
from unstuck.notify.waiting import Answer, Watcher
from unstuck.store.records import Enqueued, NewJob, Outcome

PATIENCE_S = 10.0


def enqueue_together(write: Callable[[Sequence[NewJob]], list[Enqueued]], count: int) -> list[Any]:
    """Have `count` threads share the second write; give their answers or errors. The first write is job "0"."""
    entered, go_on = threading.Event(), threading.Event()
    calls = 0

    def guarded(jobs: Sequence[NewJob]) -> list[Enqueued]:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            go_on.wait(PATIENCE_S)
            return [Enqueued(0)]
        return write(jobs)

    coalescer = Coalescer(guarded)
    answers: dict[int, Any] = {}

    def enqueue(number: int) -> None:
        try:
            answers[number] = coalescer.enqueue([NewJob(str(number), "q", b"")])
        except BaseException as error:
            answers[number] = error

    threads = [threading.Thread(target=enqueue, args=(number,), daemon=True) for number in range(count + 1)]
    threads[0].start()
    assert entered.wait(PATIENCE_S)
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(coalescer._waiting) == count, "everybody waits")
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [answers.get(number) for number in range(1, count + 1)]


def test_ctrl_c_in_the_thread_that_writes_for_all_leaves_nobody_waiting() -> None:
    def write(_jobs: Sequence[NewJob]) -> list[Enqueued]:
        raise KeyboardInterrupt

    answers = enqueue_together(write, 4)
    assert sum(isinstance(answer, KeyboardInterrupt) for answer in answers) == 1
    assert sum(isinstance(answer, UncertainCommit) for answer in answers) == 3


def test_a_batch_whose_commit_is_uncertain_is_not_written_again_one_by_one() -> None:
    written: list[str] = []

    def write(jobs: Sequence[NewJob]) -> list[Enqueued]:
        written.extend(job.task for job in jobs)
        raise UncertainCommit("the answer was lost")

    answers = enqueue_together(write, 4)
    assert all(isinstance(answer, UncertainCommit) for answer in answers)
    assert sorted(written) == ["1", "2", "3", "4"]


class Outcomes:
    """As much of a ledger as somebody who waits needs."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.trouble: Exception | None = None

    def outcomes(self, job_ids: Iterable[int]) -> list[Outcome]:
        if self.trouble is not None:
            raise self.trouble
        return [Outcome(job_id, JobState.SUCCEEDED, b"1", None) for job_id in job_ids if job_id in self.finished]

    def missing(self, _job_ids: Iterable[int]) -> set[int]:
        return set()


def watcher_of(ledger: Outcomes) -> Watcher:
    return Watcher(lambda: ledger, lambda _: None, lambda job_id: JobNotFound(str(job_id)))  # type: ignore[arg-type,return-value]


def wait_with(watcher: Watcher, job_id: int) -> Answer:
    told = threading.Event()
    answers: list[Answer] = []
    watcher.add(job_id, lambda answer: (answers.append(answer), told.set())[0])
    assert told.wait(PATIENCE_S), "nobody told us"
    return answers[0]


def test_one_who_waits_on_a_closed_event_loop_does_not_silence_the_others() -> None:
    ledger = Outcomes()
    watcher = watcher_of(ledger)
    loop = asyncio.new_event_loop()
    watcher.add(1, lambda answer: loop.call_soon_threadsafe(print, answer) and None)
    loop.close()
    ledger.finished = {1, 2}
    assert isinstance(wait_with(watcher, 2), Outcome)
    assert isinstance(wait_with(watcher, 2), Outcome)


def test_a_surprise_while_waiting_is_told_and_not_kept() -> None:
    ledger = Outcomes()
    watcher = watcher_of(ledger)
    ledger.trouble = TypeError("a surprise")
    answer = wait_with(watcher, 1)
    assert isinstance(answer, Exception)
    assert "a surprise" in str(answer)
    ledger.trouble = None
    ledger.finished = {1}
    assert isinstance(wait_with(watcher, 1), Outcome)


@pytest.mark.parametrize("error", [LedgerUnavailable("away"), TypeError("a surprise")])
def test_a_bell_that_fails_once_is_rung_the_next_time(error: Exception) -> None:
    rung: list[str] = []
    heard = threading.Event()

    def ring(words: Iterable[str]) -> None:
        if not rung:
            rung.append("failed")
            heard.set()
            raise error
        rung.extend(words)
        heard.set()

    ringer = Ringer(ring)
    ringer.ring({"queue:a"})
    assert heard.wait(PATIENCE_S)
    heard.clear()
    ringer.flush()
    ringer.ring({"queue:b"})
    assert heard.wait(PATIENCE_S)
    assert rung == ["failed", "queue:b"]
