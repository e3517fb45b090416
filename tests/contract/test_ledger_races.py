"""Worker and watchman at the same instant: whatever the order, exactly one of them ends the attempt."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import (
    birth,
    claim,
    crash,
    crash_retry,
    done,
    new_job,
    put,
    run,
    running,
    state_of,
    turn,
    verdict,
    wish,
)

from unstuck.domain.endings import Release
from unstuck.domain.states import FINAL, JobState, WorkerState
from unstuck.store.contract import Ledger
from unstuck.store.postgres import clients
from unstuck.store.records import Claimed, GuardDead, GuardNone, Held, Pulse

ROUNDS = 25


def at_once(*actions: Callable[[], object]) -> None:
    """Run actions in threads that begin together; a failure in one of them fails the test."""
    gate = threading.Barrier(len(actions))
    trouble: list[BaseException] = []

    def act(action: Callable[[], object]) -> None:
        gate.wait()
        try:
            action()
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]


def run_if_there(ledger: Ledger) -> list[Claimed]:
    """Claim and start, leaving out what somebody cancels in between."""
    jobs = claim(ledger)
    lost = turn(ledger, start=[Held(job.job_id, job.token) for job in jobs]).superseded
    return [job for job in jobs if (job.job_id, job.token) not in lost]


def test_the_late_result_and_the_sweep_meet_and_exactly_one_wins(
    ledger: Ledger, w1: str, open_again: OpenLedger
) -> None:
    reaper = open_again()
    reaper.workers()
    for _ in range(ROUNDS):
        job = running(ledger)
        worker_lost: list[bool] = []
        reaper_won: list[bool] = []
        at_once(
            lambda job=job, lost=worker_lost: lost.append(bool(turn(ledger, done=[done(job)]).superseded)),
            lambda job=job, won=reaper_won: won.append(bool(reaper.settle("w1", [crash(job)], [], GuardNone()))),
        )
        assert worker_lost == reaper_won
        expected = JobState.FAILED if reaper_won[0] else JobState.SUCCEEDED
        assert state_of(ledger, job.job_id) is expected
        assert len(ledger.attempts(job.job_id)) == 1


def test_two_watchmen_meet_and_the_job_is_requeued_once(ledger: Ledger, w1: str, open_again: OpenLedger) -> None:
    reapers = [open_again(), open_again()]
    for _ in range(ROUNDS):
        job = running(ledger)
        written: list[tuple[int, int]] = []
        at_once(
            *[
                lambda job=job, reaper=reaper, written=written: written.extend(
                    reaper.settle("w1", [crash_retry(job)], [], GuardNone())
                )
                for reaper in reapers
            ]
        )
        assert written == [(job.job_id, job.token)]
        record = ledger.job(job.job_id)
        assert record is not None
        assert (record.state, record.crash_count) == (JobState.PENDING, 1)
        assert [event.kind for event in ledger.events(job_id=job.job_id)] == ["requeued"]
        [again] = run(ledger)
        turn(ledger, done=[done(again)])


def test_a_turn_and_the_verdict_meet_and_nothing_is_held_unseen(ledger: Ledger, open_again: OpenLedger) -> None:
    """Either the verdict comes first and the turn is refused, or the sweep sees all that the turn took."""
    reaper = open_again()
    for number in range(ROUNDS):
        worker_id = f"victim-{number}"
        ledger.register(birth(worker_id))
        ledger.enqueue([new_job() for _ in range(3)])
        swept: list[int] = []

        def sweep(worker_id: str = worker_id, swept: list[int] = swept) -> None:
            if reaper.condemn(worker_id, verdict(), GuardNone()):
                swept.extend(job.job_id for job in reaper.held_by(worker_id, 100))

        taken: list[int] = []

        def take(worker_id: str = worker_id, taken: list[int] = taken) -> None:
            taken.extend(job.job_id for job in wish(ledger, worker_id, 3).claimed)

        at_once(take, sweep)
        assert sorted(swept) == sorted(taken)
        held = reaper.held_by(worker_id, 100)
        reaper.settle(worker_id, [], [Release(job.job_id, job.token) for job in held], GuardDead())
    assert ledger.count_jobs() == {"pending": 3 * ROUNDS}


def test_a_beat_and_the_verdict_meet_and_they_agree_who_came_first(ledger: Ledger, open_again: OpenLedger) -> None:
    reaper = open_again()
    for number in range(ROUNDS):
        worker_id = f"victim-{number}"
        ledger.register(birth(worker_id))
        answers: list[WorkerState] = []
        at_once(
            lambda worker_id=worker_id, answers=answers: answers.append(ledger.beat(Pulse(worker_id, 0, 0)).state),
            lambda worker_id=worker_id: reaper.condemn(worker_id, verdict(), GuardNone()),
        )
        assert ledger.beat(Pulse(worker_id, 0, 0)).state is WorkerState.DEAD
        assert answers[0] in (WorkerState.ACTIVE, WorkerState.DEAD)


def test_a_cancellation_and_a_claim_meet_and_the_job_is_one_or_the_other(
    ledger: Ledger, w1: str, open_again: OpenLedger
) -> None:
    operator = open_again()
    for _ in range(ROUNDS):
        job_id = put(ledger)
        answers: dict[int, str] = {}
        claimed_jobs: list[Claimed] = []
        at_once(
            lambda job_id=job_id, answers=answers: answers.update(operator.cancel([job_id], "ops")),
            lambda claimed_jobs=claimed_jobs: claimed_jobs.extend(run_if_there(ledger)),
        )
        state = state_of(ledger, job_id)
        if answers[job_id] == "cancelled":
            assert state is JobState.CANCELLED
        else:
            assert answers[job_id] == "requested"
            assert state is JobState.RUNNING
            assert [job.job_id for job in claimed_jobs] == [job_id]
            [job] = claimed_jobs
            ledger.settle("w1", [crash(job)], [], GuardNone())
        assert state_of(ledger, job_id) in FINAL


@pytest.mark.parametrize("handles", [1, 3])
def test_one_ledger_object_serves_many_threads(ledger: Ledger, open_again: OpenLedger, handles: int) -> None:
    ledgers = [ledger, *(open_again() for _ in range(handles - 1))]
    ledger.register(birth("w1"))

    def work(mine: Ledger, number: int) -> None:
        for _ in range(10):
            mine.enqueue([new_job()])
            mine.beat(Pulse("w1", 0, number))
            for job in run_if_there(mine):
                turn(mine, done=[done(job)])
            mine.count_jobs()
            mine.watch()

    at_once(*[lambda mine=ledgers[n % handles], n=n: work(mine, n) for n in range(6)])
    for job in run_if_there(ledger):
        turn(ledger, done=[done(job)])
    assert ledger.count_jobs() == {"succeeded": 60}


def test_large_enqueues_with_the_same_keys_in_another_order_do_not_wait_for_each_other(
    ledger: Ledger, open_again: OpenLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CHUNK_JOBS", 20)
    ledgers = (ledger, open_again())
    for n in range(10):
        keys = [f"{n} {word} {key}" for key in range(20) for word in ("a", "B", "é")]
        batches = [[new_job(unique_key=key) for key in order] for order in (keys, keys[::-1])]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda pair: pair[0].enqueue(pair[1]), zip(ledgers, batches, strict=True))
        assert [one.job_id for one in first] == [one.job_id for one in reversed(second)]
        assert all(a.fresh is not b.fresh for a, b in zip(first, reversed(second), strict=True))
