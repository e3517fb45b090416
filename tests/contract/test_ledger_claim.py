"""Who gets what: order, queues, pauses, unknown tasks, run-ahead; and never two for one."""

import threading

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, claim, crash_retry, new_job, put, release, run, running, state_of, turn, wish
from tests.contract.meddling import Meddler

from unstuck.domain.limits import QueueLimit
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import CLAIM_BYTES, Turn, Wish


def test_first_come_first_served(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger) for _ in range(5)]
    assert [job.job_id for job in claim(ledger, limit=2)] == ids[:2]
    assert [job.job_id for job in claim(ledger, limit=10)] == ids[2:]


def test_higher_priority_goes_first_whenever_it_came(ledger: Ledger, w1: str) -> None:
    low, normal, high, highest = (put(ledger, priority=p) for p in (-1000, 0, 10, 1000))
    assert [job.job_id for job in claim(ledger)] == [highest, high, normal, low]


def test_several_queues_are_served_as_if_they_were_one_line(ledger: Ledger, w1: str) -> None:
    a1 = put(ledger, queue="a")
    b1 = put(ledger, queue="b")
    a2 = put(ledger, queue="a", priority=5)
    b2 = put(ledger, queue="b")
    put(ledger, queue="c")
    first = claim(ledger, limit=3, queues=("b", "a"))
    assert {job.job_id for job in first} == {a2, a1, b1}
    assert [job.job_id for job in claim(ledger, limit=3, queues=("b", "a"))] == [b2]


def test_one_full_queue_does_not_starve_another_of_the_same_rank(ledger: Ledger, w1: str) -> None:
    ledger.enqueue([new_job(queue="full") for _ in range(20)])
    late = put(ledger, queue="small", priority=1)
    assert late in {job.job_id for job in claim(ledger, limit=5, queues=("full", "small"))}


def test_a_claim_gives_what_the_worker_needs_to_know(ledger: Ledger, w1: str) -> None:
    put(ledger, payload=b"p", policy=b"{}")
    [job] = claim(ledger)
    assert (job.task, job.queue, job.payload, job.payload_type, job.policy) == ("add", "default", b"p", "json", b"{}")
    assert (job.running, job.failures, job.crashes, job.attempt) == (False, 0, 0, 1)
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.attempt) == (JobState.CLAIMED, "w1", job.token, 0)
    assert record.claimed_at is not None
    assert record.started_at is None


def test_what_slots_wait_for_is_started_in_the_commit_that_claims_it(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger), put(ledger, priority=1), put(ledger)]
    claimed = claim(ledger, limit=3, start=2)
    assert [(job.job_id, job.running, job.attempt) for job in claimed] == [
        (ids[1], True, 1),
        (ids[0], True, 1),
        (ids[2], False, 1),
    ]
    assert [state_of(ledger, job_id) for job_id in ids] == [JobState.RUNNING, JobState.RUNNING, JobState.CLAIMED]
    record = ledger.job(ids[0])
    assert record is not None
    assert record.started_at is not None
    assert record.attempt == 1


def test_a_job_of_a_task_that_this_worker_does_not_know_is_left_for_others(ledger: Ledger, w1: str, w2: str) -> None:
    unknown = put(ledger, task="from_the_next_release")
    known = put(ledger)
    assert [job.job_id for job in claim(ledger)] == [known]
    assert state_of(ledger, unknown) is JobState.PENDING
    assert [job.job_id for job in claim(ledger, "w2", tasks=("from_the_next_release",))] == [unknown]


def test_a_worker_without_tasks_or_queues_gets_nothing(ledger: Ledger, w1: str) -> None:
    put(ledger)
    assert claim(ledger, tasks=()) == []
    assert claim(ledger, queues=()) == []
    assert claim(ledger, limit=0) == []


def test_a_paused_queue_gives_nothing_until_it_is_resumed(ledger: Ledger, w1: str) -> None:
    paused = put(ledger, queue="a")
    other = put(ledger, queue="b")
    assert ledger.pause("a", "ops") == ["a"]
    assert [job.job_id for job in claim(ledger, queues=("a", "b"))] == [other]
    assert claim(ledger, queues=("a",)) == []
    assert ledger.resume("a", "ops") == ["a"]
    assert [job.job_id for job in claim(ledger, queues=("a",))] == [paused]


def test_run_ahead_makes_only_retryable_jobs_running_at_once(ledger: Ledger, w1: str) -> None:
    careful = put(ledger)
    hardy = put(ledger, on_crash="retry")
    jobs = {job.job_id: job for job in claim(ledger, run_ahead=True)}
    assert not jobs[careful].running
    assert jobs[hardy].running
    assert (state_of(ledger, careful), state_of(ledger, hardy)) == (JobState.CLAIMED, JobState.RUNNING)
    assert [jobs[careful].attempt, jobs[hardy].attempt] == [1, 1]
    record = ledger.job(hardy)
    assert record is not None
    assert record.attempt == 1
    assert record.started_at is not None


def test_without_run_ahead_nothing_runs_before_it_is_started(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry")
    assert [job.running for job in claim(ledger)] == [False]


def test_tokens_are_never_used_twice(ledger: Ledger, w1: str) -> None:
    put(ledger)
    seen = set()
    for _ in range(20):
        [job] = claim(ledger)
        assert job.token not in seen
        seen.add(job.token)
        turn(ledger, release=[release(job)])


def test_an_empty_ledger_says_that_nothing_is_due(ledger: Ledger, w1: str) -> None:
    answer = wish(ledger)
    assert answer.alive
    assert answer.claimed == ()
    assert answer.next_due_in_s is None


def test_two_crowds_of_claimers_never_get_the_same_job(ledger: Ledger, open_again: OpenLedger) -> None:
    ledger.enqueue([new_job(queue=queue) for queue in ("a", "b") for _ in range(150)])
    taken: list[int] = []
    handles = [ledger, open_again(), open_again(), open_again()]

    def drain(handle: Ledger, worker_id: str) -> None:
        handle.register(birth(worker_id))
        while jobs := run(handle, worker_id, 7, queues=("a", "b")):
            taken.extend(job.job_id for job in jobs)

    threads = [threading.Thread(target=drain, args=(handle, f"w{n}")) for n, handle in enumerate(handles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 300


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_of_a_wish_is_kept(ledger: Ledger, w1: str, limit: int) -> None:
    ledger.enqueue([new_job(queue=queue) for queue in ("a", "b", "c") for _ in range(5)])
    assert len(claim(ledger, limit=limit, queues=("a", "b", "c"))) == limit


def test_a_turn_that_gives_a_job_back_and_takes_it_again_begins_the_second_attempt_after_the_first(
    ledger: Ledger, w1: str
) -> None:
    jobs = [running(ledger) for _ in range(20)]
    again = ledger.turn(
        Turn(
            "w1",
            endings=tuple(crash_retry(job, counter="none") for job in jobs),
            wish=Wish(("default",), ("add",), 100, start=100),
        )
    )
    assert len(again.claimed) == len(jobs)
    for job in jobs:
        first, second = ledger.attempts(job.job_id)
        assert first.ended_at is not None
        assert second.started_at is not None
        assert first.ended_at <= second.started_at


def test_a_claim_says_for_how_long_the_job_had_been_due(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    late, scheduled = put(ledger), put(ledger, delay_s=100.0)
    meddler.age_job(late, 50.0)
    meddler.age_job(scheduled, 130.0)
    ledger.promote_due(10)
    waited = {job.job_id: job.waited_s for job in claim(ledger)}
    assert waited[late] == pytest.approx(50.0, abs=20.0)
    assert waited[scheduled] == pytest.approx(30.0, abs=20.0)
    put(ledger)
    assert 0.0 <= claim(ledger)[0].waited_s < 20.0


LARGE = b'"' + b"x" * 1_000_000 + b'"'


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("queues", [("q",), ("q", "r")])
def test_what_is_claimed_at_once_fits_into_memory(
    ledger: Ledger, w1: str, queues: tuple[str, ...], limited: bool
) -> None:
    if limited:
        ledger.limit_queue(queues[0], QueueLimit(concurrency=100), "test")
    ids = [put(ledger, queue=queues[number % len(queues)], payload=LARGE) for number in range(20)]
    small = put(ledger, queue=queues[0])
    taken: list[int] = []
    for _ in range(10):
        answer = wish(ledger, queues=queues, start=1000)
        assert sum(len(job.payload) for job in answer.claimed) <= 2 * CLAIM_BYTES
        taken += [job.job_id for job in answer.claimed]
        if not answer.more:
            break
        assert answer.claimed
        assert len(taken) < 20
    assert sorted(taken) == [*ids, small]
    assert len(taken) > 8


def test_a_job_that_is_larger_than_all_may_be_together_is_claimed_alone(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger, payload=LARGE * 9) for _ in range(2)]
    first, second, rest = (wish(ledger) for _ in range(3))
    assert [[job.job_id for job in answer.claimed] for answer in (first, second, rest)] == [[ids[0]], [ids[1]], []]
    assert [answer.more for answer in (first, second, rest)] == [True, False, False]
    assert len(first.claimed[0].payload) > CLAIM_BYTES
