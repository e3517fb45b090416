"""What many threads of a client share: the one who writes for all, the one who waits for all, the one who rings."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.dashboard import job
from tests.support.fleet import wait_for

from unstuck.client.batcher import EnqueueBatcher
from unstuck.client.operator.jobs import FIRST_SPAN, JobPage, search
from unstuck.domain.states import JobState
from unstuck.errors import JobNotFound, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.jobs import Enqueued, JobFilter, JobRecord, NewJob, Outcome
from unstuck.notify.results import Answer, ResultWatcher
from unstuck.notify.wakeups import WakeupSender

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

    coalescer = EnqueueBatcher(guarded)
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
    """As much of a ledger, and of its part for jobs, as a client that waits needs."""

    def __init__(self) -> None:
        self.jobs = self
        self.finished: set[int] = set()
        self.trouble: Exception | None = None

    def outcomes(self, job_ids: Iterable[int]) -> list[Outcome]:
        if self.trouble is not None:
            raise self.trouble
        return [Outcome(job_id, JobState.SUCCEEDED, b"1", None) for job_id in job_ids if job_id in self.finished]

    def missing(self, _job_ids: Iterable[int]) -> set[int]:
        return set()


def watcher_of(ledger: Outcomes) -> ResultWatcher:
    return ResultWatcher(lambda: ledger, lambda _: None, lambda job_id: JobNotFound(str(job_id)))  # type: ignore[arg-type,return-value]


def wait_with(watcher: ResultWatcher, job_id: int) -> Answer:
    told = threading.Event()
    answers: list[Answer] = []
    watcher.wait(job_id, lambda answer: (answers.append(answer), told.set())[0])
    assert told.wait(PATIENCE_S), "nobody told us"
    return answers[0]


def test_one_who_waits_on_a_closed_event_loop_does_not_silence_the_others() -> None:
    ledger = Outcomes()
    watcher = watcher_of(ledger)
    loop = asyncio.new_event_loop()
    watcher.wait(1, lambda answer: loop.call_soon_threadsafe(print, answer) and None)
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

    ringer = WakeupSender(ring)
    ringer.send({"queue:a"})
    assert heard.wait(PATIENCE_S)
    heard.clear()
    ringer.flush()
    ringer.send({"queue:b"})
    assert heard.wait(PATIENCE_S)
    assert rung == ["failed", "queue:b"]


def batched_job(number: int) -> NewJob:
    return NewJob(str(number), "q", b"")


def start(coalescer: EnqueueBatcher, number: int, returned: Callable[[int], object]) -> threading.Thread:
    def enqueue() -> None:
        coalescer.enqueue([batched_job(number)])
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
    coalescer = EnqueueBatcher(disk)
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
    coalescer = EnqueueBatcher(disk)
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
        coalescer.enqueue([batched_job(1)])
    disk.go_on.release()
    disk.go_on.release()
    for thread in (first, *third):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert disk.batches == [["0"], ["2"]], "what was interrupted before it was written is not stored"


class Many:
    """Jobs of which few match; every number that is looked at takes its time."""

    def __init__(self, newest: int, matching: list[int], per_id_s: float = 0.0) -> None:
        self.newest = newest
        self.matching = sorted(matching, reverse=True)
        self.per_id_s = per_id_s
        self.now_s = 0.0
        self.asked = 0

    def list_jobs(self, where: JobFilter) -> list[JobRecord]:
        if where == JobFilter(limit=1):
            return [self._job(self.newest)] if self.newest else []
        assert where.before_id is not None
        assert where.from_id is not None
        self.asked += 1
        self.now_s += self.per_id_s * (where.before_id - where.from_id)
        return [self._job(n) for n in self.matching if where.from_id <= n < where.before_id][: where.limit]

    def search(self, where: JobFilter) -> JobPage:
        return search(self.list_jobs, where, clock=lambda: self.now_s)

    def _job(self, number: int) -> JobRecord:
        return msgspec.structs.replace(job(enqueued_at=0.0, finished_at=None), id=number)


def all_of(many: Many, limit: int) -> tuple[list[int], int]:
    """Turn the pages until there is no next one; give the numbers, and how many pages it took."""
    where, ids, pages = JobFilter(task="rare", limit=limit), [], 0
    while True:
        found = many.search(where)
        ids += [one.id for one in found.jobs]
        pages += 1
        if found.before_id is None:
            return ids, pages
        where = msgspec.structs.replace(where, before_id=found.before_id)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_everything_is_found_once(limit: int) -> None:
    matching = [1, 2, FIRST_SPAN, FIRST_SPAN + 1, 500_000, 999_999, 1_000_000]
    ids, _ = all_of(Many(1_000_000, matching), limit)
    assert ids == sorted(matching, reverse=True)


def test_a_filter_that_nothing_matches_ends_after_a_while_and_says_where_to_go_on() -> None:
    many = Many(10_000_000, [3], per_id_s=1e-6)
    found = many.search(JobFilter(task="rare"))
    assert found.jobs == []
    assert many.now_s < 2.0
    assert found.before_id is not None
    assert 8_000_000 < found.before_id < 9_500_000
    assert all_of(Many(10_000_000, [3], per_id_s=1e-6), 100)[0] == [3]


def test_numbers_that_are_long_gone_are_passed_in_few_steps() -> None:
    many = Many(10_000_000_000, [10_000_000_000])
    assert [one.id for one in many.search(JobFilter(task="rare")).jobs] == [10_000_000_000]
    assert many.asked < 20


def test_where_there_is_nothing_there_is_no_next_page() -> None:
    assert Many(0, []).search(JobFilter()) == JobPage([], None)
    assert Many(5, [5]).search(JobFilter(limit=1)).before_id is None
