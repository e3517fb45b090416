"""Jobs on their way in: durable, in order, all or none, once per key."""

import math
import threading
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.builders import birth, claim_jobs, crash, done, new_job, put, run, running, turn, wish

from unstuck.domain.states import JobState
from unstuck.errors import RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter, OnceAnswer, Request
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.contract.workflows import NewNode, NewWorkflow


def test_a_job_is_there_for_everyone_when_enqueue_returns(ledger: Ledger, open_again: OpenLedger) -> None:
    job_id = put(
        ledger,
        payload=b"\x00\xff",
        payload_type="cbor",
        policy=b"{}",
        on_crash="retry",
        heartbeat=False,
        timeout_s=5.0,
        priority=7,
        enqueued_by="me",
    )
    record = open_again().jobs.get(job_id)
    assert record is not None
    assert (record.state, record.payload, record.payload_type, record.policy) == (
        JobState.PENDING,
        b"\x00\xff",
        "cbor",
        b"{}",
    )
    assert (record.priority, record.enqueued_by, record.attempt, record.failures, record.crash_count) == (
        7,
        "me",
        0,
        0,
        0,
    )
    assert record.worker_id is None
    assert record.token is None
    assert record.run_at == pytest.approx(record.enqueued_at)


def test_ids_are_small_whole_numbers_in_the_order_of_the_batch(ledger: Ledger) -> None:
    answers = ledger.jobs.enqueue([new_job() for _ in range(50)])
    ids = [answer.job_id for answer in answers]
    assert ids == sorted(set(ids))
    assert ids[0] >= 1
    assert ids[-1] < 10_000
    assert all(answer.fresh for answer in answers)


def test_enqueueing_nothing_is_no_error(ledger: Ledger) -> None:
    assert ledger.jobs.enqueue([]) == []


def test_an_id_never_comes_back_after_its_job_was_pruned(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.maintenance.prune(0.0) == 1
    assert put(ledger) > job.job_id


def test_one_bad_job_of_a_batch_leaves_nothing_half_written(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.jobs.enqueue([new_job(), new_job(unique_key="nul\0key"), new_job()])
    assert ledger.jobs.count() == {}
    assert put(ledger) > 0


@pytest.mark.parametrize("text", ["nul\0", "lone \ud800 surrogate"])
@pytest.mark.parametrize("field", ["unique_key", "enqueued_by"])
def test_text_that_cannot_be_stored_is_refused_with_a_cure(ledger: Ledger, field: str, text: str) -> None:
    with pytest.raises(RefusedValue, match=r"\."):
        put(ledger, **{field: text})
    assert ledger.jobs.count() == {}


def test_a_unique_key_gives_the_job_that_is_already_there(ledger: Ledger) -> None:
    first = ledger.jobs.enqueue([new_job(unique_key="once")])[0]
    again = ledger.jobs.enqueue([new_job(unique_key="once"), new_job(unique_key="other")])
    assert first.fresh
    assert (again[0].job_id, again[0].fresh) == (first.job_id, False)
    assert again[1].fresh


def test_the_same_key_twice_in_one_batch_is_one_job(ledger: Ledger) -> None:
    first, second = ledger.jobs.enqueue([new_job(unique_key="once"), new_job(unique_key="once")])
    assert first.fresh
    assert (second.job_id, second.fresh) == (first.job_id, False)
    assert ledger.jobs.count() == {"pending": 1}


def test_a_key_is_held_until_its_job_is_finished_and_not_longer(ledger: Ledger, w1: str) -> None:
    job = running(ledger, unique_key="once")
    assert not ledger.jobs.enqueue([new_job(unique_key="once")])[0].fresh
    turn(ledger, done=[done(job)])
    assert ledger.jobs.enqueue([new_job(unique_key="once")])[0].fresh
    [again] = run(ledger)
    turn(ledger, endings=[crash(again)])
    assert ledger.jobs.enqueue([new_job(unique_key="once")])[0].fresh


def test_of_many_threads_with_one_key_exactly_one_enqueues(ledger: Ledger, open_again: OpenLedger) -> None:
    handles = [ledger, open_again(), open_again(), open_again()]
    for number in range(8):
        gate = threading.Barrier(len(handles))
        answers = []

        def enqueue(handle: Ledger, key: str, gate: threading.Barrier = gate, answers: list = answers) -> None:  # type: ignore[type-arg]
            gate.wait()
            answers.extend(handle.jobs.enqueue([new_job(unique_key=key)]))

        threads = [threading.Thread(target=enqueue, args=(handle, f"key-{number}")) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(answer.fresh for answer in answers) == 1
        assert len({answer.job_id for answer in answers}) == 1


def test_a_crowd_of_clients_loses_no_job_and_repeats_no_id(ledger: Ledger, open_again: OpenLedger) -> None:
    handles = [ledger, open_again(), open_again()]
    ids: list[int] = []

    def enqueue(handle: Ledger) -> None:
        for _ in range(20):
            ids.extend(answer.job_id for answer in handle.jobs.enqueue([new_job()] * 5))

    threads = [threading.Thread(target=enqueue, args=(handle,)) for handle in handles for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == len(set(ids)) == 600
    assert ledger.jobs.count() == {"pending": 600}


def test_payloads_of_a_mebibyte_come_back_unchanged(ledger: Ledger, w1: str) -> None:
    payload = bytes(range(256)) * 4096
    put(ledger, payload=payload)
    put(ledger, payload=payload[::-1])
    ledger.workers.register(birth("w3"))
    assert [job.payload for job in claim_jobs(ledger)] == [payload, payload[::-1]]


DAY_S = 86400.0


def request(key: bytes = b"k", fingerprint: bytes = b"f", keep_s: float = DAY_S) -> Request:
    return Request(key, fingerprint, keep_s)


def count(ledger: Ledger) -> int:
    return sum(ledger.jobs.count().values())


def test_a_request_that_is_sent_again_gets_the_first_answer(ledger: Ledger) -> None:
    first = ledger.jobs.enqueue_once(request(), [new_job(), new_job()])
    again = ledger.jobs.enqueue_once(request(), [new_job(), new_job()])
    assert not first.repeated
    assert [item.fresh for item in first.stored] == [True, True]
    assert again == OnceAnswer(first.stored, repeated=True)
    assert count(ledger) == 2


def test_it_holds_after_the_job_has_ended_and_was_removed(ledger: Ledger, w1: str) -> None:
    first = ledger.jobs.enqueue_once(request(), [new_job()])
    [job] = run(ledger)
    assert job.job_id == first.stored[0].job_id
    turn(ledger, done=[done(job)])
    assert ledger.jobs.enqueue_once(request(), [new_job()]).stored == first.stored
    assert ledger.maintenance.prune(0.0) == 1
    assert ledger.jobs.enqueue_once(request(), [new_job()]) == OnceAnswer(first.stored, repeated=True)
    assert count(ledger) == 0


def test_another_key_is_another_request(ledger: Ledger) -> None:
    one, two = (ledger.jobs.enqueue_once(request(key), [new_job()]) for key in (b"one", b"two"))
    assert one.stored != two.stored
    assert not two.repeated


def test_a_key_that_comes_with_something_else_stores_nothing(ledger: Ledger) -> None:
    ledger.jobs.enqueue_once(request(), [new_job()])
    assert ledger.jobs.enqueue_once(request(fingerprint=b"g"), [new_job(task="other")]) == OnceAnswer((), repeated=True)
    assert count(ledger) == 1


def test_a_key_is_forgotten_after_its_time(ledger: Ledger) -> None:
    first = ledger.jobs.enqueue_once(request(), [new_job()])
    for n in range(30):
        ledger.jobs.enqueue_once(request(b"other %d" % n), [new_job()])
    late = ledger.jobs.enqueue_once(request(fingerprint=b"g", keep_s=0.0), [new_job()])
    assert not late.repeated
    assert late.stored != first.stored


def test_unique_keys_keep_their_meaning(ledger: Ledger) -> None:
    there = put(ledger, unique_key="u")
    first = ledger.jobs.enqueue_once(request(), [new_job(unique_key="u"), new_job()])
    assert [(item.job_id == there, item.fresh) for item in first.stored] == [(True, False), (False, True)]
    assert ledger.jobs.enqueue_once(request(), [new_job(unique_key="u"), new_job()]) == OnceAnswer(first.stored, True)


def test_a_refused_job_leaves_neither_jobs_nor_key(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.jobs.enqueue_once(request(), [new_job(), new_job(unique_key="nul\0key")])
    assert count(ledger) == 0
    assert not ledger.jobs.enqueue_once(request(), [new_job()]).repeated


def test_many_who_send_the_same_request_at_once_store_it_once(open_again: OpenLedger, ledger: Ledger) -> None:
    ledgers = [open_again() for _ in range(6)]
    start = threading.Barrier(len(ledgers))
    answers: list[Any] = []

    def send(mine: Ledger) -> None:
        start.wait()
        answers.append(mine.jobs.enqueue_once(request(), [new_job()] * 3))

    threads = [threading.Thread(target=send, args=(mine,)) for mine in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.stored for answer in answers}) == 1
    assert sorted(answer.repeated for answer in answers) == [False, True, True, True, True, True]
    assert count(ledger) == 3


def flow(unique_key: str | None = None) -> NewWorkflow:
    nodes = (NewNode(0, None, "all", "group", source=1), NewNode(1, 0, "one", "task", job=new_job()))
    return NewWorkflow("all", new_job(task="unstuck.workflow", unique_key=unique_key), nodes, ())


def test_a_workflow_that_is_asked_for_again_is_the_first_one(ledger: Ledger, w1: str) -> None:
    first = ledger.workflows.begin_once(request(), flow())
    assert (first.repeated, first.stored[0].fresh) == (False, True)
    turn(ledger, done=[done(job) for job in run(ledger)])
    assert ledger.workflows.begin_once(request(), flow()) == OnceAnswer(first.stored, repeated=True)
    assert [one.id for one in ledger.workflows.list()] == [first.stored[0].job_id]
    assert count(ledger) == 2


def test_another_request_with_the_key_of_a_workflow_stores_nothing(ledger: Ledger) -> None:
    ledger.jobs.enqueue_once(request(), [new_job(), new_job()])
    assert ledger.workflows.begin_once(request(fingerprint=b"other"), flow()) == OnceAnswer((), repeated=True)
    assert ledger.workflows.list() == []


def test_a_workflow_whose_unique_key_is_in_use_is_remembered_as_the_one_that_has_it(ledger: Ledger) -> None:
    owner = ledger.workflows.begin(flow("k")).job_id
    first = ledger.workflows.begin_once(request(), flow("k"))
    assert [(item.job_id, item.fresh) for item in first.stored] == [(owner, False)]
    assert not first.repeated
    ledger.jobs.cancel([owner], "me")
    assert ledger.workflows.begin_once(request(), flow("k")) == OnceAnswer(first.stored, repeated=True)


def test_many_who_ask_for_the_same_workflow_at_once_begin_it_once(open_again: OpenLedger, ledger: Ledger) -> None:
    ledgers = [open_again() for _ in range(10)]
    start = threading.Barrier(len(ledgers))
    answers: list[OnceAnswer] = []

    def send(mine: Ledger) -> None:
        start.wait()
        answers.append(mine.workflows.begin_once(request(), flow()))

    threads = [threading.Thread(target=send, args=(mine,)) for mine in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.stored for answer in answers}) == 1
    assert sorted(answer.repeated for answer in answers) == [False, *[True] * 9]
    assert (len(ledger.workflows.list()), count(ledger)) == (1, 2)


def test_a_workflow_that_was_removed_is_not_begun_again_by_the_same_request(ledger: Ledger, w1: str) -> None:
    first = ledger.workflows.begin_once(request(), flow())
    turn(ledger, done=[done(job) for job in run(ledger)])
    ledger.maintenance.prune(0)
    assert ledger.workflows.begin_once(request(), flow()) == OnceAnswer(first.stored, repeated=True)
    assert (ledger.workflows.list(), count(ledger)) == ([], 0)


UNUSABLE: tuple[dict[str, Any], ...] = (
    {"run_at": math.inf},
    {"run_at": -math.inf},
    {"run_at": math.nan},
    {"run_at": 1e12},
    {"delay_s": math.inf},
    {"delay_s": math.nan},
    {"timeout_s": math.inf},
    {"timeout_s": 1e300},
    {"heartbeat_timeout_s": math.nan},
    {"priority": 1001},
)


@pytest.mark.parametrize("numbers", UNUSABLE, ids=str)
def test_a_number_that_no_clock_can_reach_is_refused_and_nobody_else_is_stopped(
    ledger: Ledger, w1: str, numbers: dict[str, Any]
) -> None:
    with pytest.raises(RefusedValue):
        ledger.jobs.enqueue([new_job(), new_job(**numbers)])
    assert ledger.jobs.list(JobFilter()) == []
    job_id = put(ledger)
    assert [job.job_id for job in claim_jobs(ledger)] == [job_id]
    assert wish(ledger).alive
    assert ledger.maintenance.promote_due(10).count == 0


def test_a_moment_long_ago_and_one_far_ahead_are_moments(ledger: Ledger, w1: str) -> None:
    long_ago = put(ledger, run_at=-1e9)
    far_ahead = put(ledger, run_at=2e11)
    assert [job.job_id for job in claim_jobs(ledger)] == [long_ago]
    [queue] = ledger.queues.list()
    assert (queue.scheduled, queue.claimed) == (1, 1)
    record = ledger.jobs.get(far_ahead)
    assert record is not None
    assert record.run_at == 2e11


@pytest.mark.parametrize("job_id", [2**63, -(2**63) - 1, 10**30])
def test_an_id_beyond_all_ids_is_refused_in_one_sentence(ledger: Ledger, job_id: int) -> None:
    known = put(ledger)
    for ask in (
        lambda: ledger.jobs.outcomes([known, job_id]),
        lambda: ledger.jobs.missing([known, job_id]),
        lambda: ledger.jobs.cancel([known, job_id], "me"),
        lambda: ledger.jobs.retry([known, job_id], "me"),
    ):
        with pytest.raises(RefusedValue):
            ask()
    assert ledger.jobs.missing([known, 2**63 - 1, -1]) == {2**63 - 1, -1}


def test_a_lone_surrogate_in_an_operators_word_or_a_beat_is_refused(ledger: Ledger, w1: str) -> None:
    with pytest.raises(RefusedValue):
        ledger.queues.pause("\ud800", "me")
    with pytest.raises(RefusedValue):
        ledger.workers.beat(Heartbeat("w1", 0, 0, {"note": "\ud800"}))
