"""A request that is sent again: whatever became of its jobs since, nothing is stored twice."""

import threading
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import done, new_job, put, run, turn

from unstuck.domain.errors import RefusedValue
from unstuck.store.contract import Ledger
from unstuck.store.records import NewNode, NewWorkflow, OnceAnswer, Request

DAY_S = 86400.0


def request(key: bytes = b"k", fingerprint: bytes = b"f", keep_s: float = DAY_S) -> Request:
    return Request(key, fingerprint, keep_s)


def count(ledger: Ledger) -> int:
    return sum(ledger.count_jobs().values())


def test_a_request_that_is_sent_again_gets_the_first_answer(ledger: Ledger) -> None:
    first = ledger.enqueue_once(request(), [new_job(), new_job()])
    again = ledger.enqueue_once(request(), [new_job(), new_job()])
    assert not first.repeated
    assert [item.fresh for item in first.stored] == [True, True]
    assert again == OnceAnswer(first.stored, repeated=True)
    assert count(ledger) == 2


def test_it_holds_after_the_job_has_ended_and_was_removed(ledger: Ledger, w1: str) -> None:
    first = ledger.enqueue_once(request(), [new_job()])
    [job] = run(ledger)
    assert job.job_id == first.stored[0].job_id
    turn(ledger, done=[done(job)])
    assert ledger.enqueue_once(request(), [new_job()]).stored == first.stored
    assert ledger.prune(0.0) == 1
    assert ledger.enqueue_once(request(), [new_job()]) == OnceAnswer(first.stored, repeated=True)
    assert count(ledger) == 0


def test_another_key_is_another_request(ledger: Ledger) -> None:
    one, two = (ledger.enqueue_once(request(key), [new_job()]) for key in (b"one", b"two"))
    assert one.stored != two.stored
    assert not two.repeated


def test_a_key_that_comes_with_something_else_stores_nothing(ledger: Ledger) -> None:
    ledger.enqueue_once(request(), [new_job()])
    assert ledger.enqueue_once(request(fingerprint=b"g"), [new_job(task="other")]) == OnceAnswer((), repeated=True)
    assert count(ledger) == 1


def test_a_key_is_forgotten_after_its_time(ledger: Ledger) -> None:
    first = ledger.enqueue_once(request(), [new_job()])
    for n in range(30):
        ledger.enqueue_once(request(b"other %d" % n), [new_job()])
    late = ledger.enqueue_once(request(fingerprint=b"g", keep_s=0.0), [new_job()])
    assert not late.repeated
    assert late.stored != first.stored


def test_unique_keys_keep_their_meaning(ledger: Ledger) -> None:
    there = put(ledger, unique_key="u")
    first = ledger.enqueue_once(request(), [new_job(unique_key="u"), new_job()])
    assert [(item.job_id == there, item.fresh) for item in first.stored] == [(True, False), (False, True)]
    assert ledger.enqueue_once(request(), [new_job(unique_key="u"), new_job()]) == OnceAnswer(first.stored, True)


def test_a_refused_job_leaves_neither_jobs_nor_key(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.enqueue_once(request(), [new_job(), new_job(unique_key="nul\0key")])
    assert count(ledger) == 0
    assert not ledger.enqueue_once(request(), [new_job()]).repeated


def test_many_who_send_the_same_request_at_once_store_it_once(open_again: OpenLedger, ledger: Ledger) -> None:
    ledgers = [open_again() for _ in range(6)]
    start = threading.Barrier(len(ledgers))
    answers: list[Any] = []

    def send(mine: Ledger) -> None:
        start.wait()
        answers.append(mine.enqueue_once(request(), [new_job()] * 3))

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
    first = ledger.begin_workflow_once(request(), flow())
    assert (first.repeated, first.stored[0].fresh) == (False, True)
    turn(ledger, done=[done(job) for job in run(ledger)])
    assert ledger.begin_workflow_once(request(), flow()) == OnceAnswer(first.stored, repeated=True)
    assert [one.id for one in ledger.workflows()] == [first.stored[0].job_id]
    assert count(ledger) == 2


def test_another_request_with_the_key_of_a_workflow_stores_nothing(ledger: Ledger) -> None:
    ledger.enqueue_once(request(), [new_job(), new_job()])
    assert ledger.begin_workflow_once(request(fingerprint=b"other"), flow()) == OnceAnswer((), repeated=True)
    assert ledger.workflows() == []


def test_a_workflow_whose_unique_key_is_in_use_is_remembered_as_the_one_that_has_it(ledger: Ledger) -> None:
    owner = ledger.begin_workflow(flow("k")).job_id
    first = ledger.begin_workflow_once(request(), flow("k"))
    assert [(item.job_id, item.fresh) for item in first.stored] == [(owner, False)]
    assert not first.repeated
    ledger.cancel([owner], "me")
    assert ledger.begin_workflow_once(request(), flow("k")) == OnceAnswer(first.stored, repeated=True)


def test_many_who_ask_for_the_same_workflow_at_once_begin_it_once(open_again: OpenLedger, ledger: Ledger) -> None:
    ledgers = [open_again() for _ in range(10)]
    start = threading.Barrier(len(ledgers))
    answers: list[OnceAnswer] = []

    def send(mine: Ledger) -> None:
        start.wait()
        answers.append(mine.begin_workflow_once(request(), flow()))

    threads = [threading.Thread(target=send, args=(mine,)) for mine in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.stored for answer in answers}) == 1
    assert sorted(answer.repeated for answer in answers) == [False, *[True] * 9]
    assert (len(ledger.workflows()), count(ledger)) == (1, 2)


def test_a_workflow_that_was_removed_is_not_begun_again_by_the_same_request(ledger: Ledger, w1: str) -> None:
    first = ledger.begin_workflow_once(request(), flow())
    turn(ledger, done=[done(job) for job in run(ledger)])
    ledger.prune(0)
    assert ledger.begin_workflow_once(request(), flow()) == OnceAnswer(first.stored, repeated=True)
    assert (ledger.workflows(), count(ledger)) == ([], 0)
