"""Jobs on their way in: durable, in order, all or none, once per key."""

import threading

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, claim, crash, done, new_job, put, run, running, turn

from unstuck.domain.errors import RefusedValue
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger


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
    record = open_again().job(job_id)
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
    answers = ledger.enqueue([new_job() for _ in range(50)])
    ids = [answer.job_id for answer in answers]
    assert ids == sorted(set(ids))
    assert ids[0] >= 1
    assert ids[-1] < 10_000
    assert all(answer.fresh for answer in answers)


def test_enqueueing_nothing_is_no_error(ledger: Ledger) -> None:
    assert ledger.enqueue([]) == []


def test_an_id_never_comes_back_after_its_job_was_pruned(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.prune(0.0) == 1
    assert put(ledger) > job.job_id


def test_one_bad_job_of_a_batch_leaves_nothing_half_written(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.enqueue([new_job(), new_job(unique_key="nul\0key"), new_job()])
    assert ledger.count_jobs() == {}
    assert put(ledger) > 0


@pytest.mark.parametrize("text", ["nul\0", "lone \ud800 surrogate"])
@pytest.mark.parametrize("field", ["unique_key", "enqueued_by"])
def test_text_that_cannot_be_stored_is_refused_with_a_cure(ledger: Ledger, field: str, text: str) -> None:
    with pytest.raises(RefusedValue, match=r"\."):
        put(ledger, **{field: text})
    assert ledger.count_jobs() == {}


def test_a_unique_key_gives_the_job_that_is_already_there(ledger: Ledger) -> None:
    first = ledger.enqueue([new_job(unique_key="once")])[0]
    again = ledger.enqueue([new_job(unique_key="once"), new_job(unique_key="other")])
    assert first.fresh
    assert (again[0].job_id, again[0].fresh) == (first.job_id, False)
    assert again[1].fresh


def test_the_same_key_twice_in_one_batch_is_one_job(ledger: Ledger) -> None:
    first, second = ledger.enqueue([new_job(unique_key="once"), new_job(unique_key="once")])
    assert first.fresh
    assert (second.job_id, second.fresh) == (first.job_id, False)
    assert ledger.count_jobs() == {"pending": 1}


def test_a_key_is_held_until_its_job_is_finished_and_not_longer(ledger: Ledger, w1: str) -> None:
    job = running(ledger, unique_key="once")
    assert not ledger.enqueue([new_job(unique_key="once")])[0].fresh
    turn(ledger, done=[done(job)])
    assert ledger.enqueue([new_job(unique_key="once")])[0].fresh
    [again] = run(ledger)
    turn(ledger, endings=[crash(again)])
    assert ledger.enqueue([new_job(unique_key="once")])[0].fresh


def test_of_many_threads_with_one_key_exactly_one_enqueues(ledger: Ledger, open_again: OpenLedger) -> None:
    handles = [ledger, open_again(), open_again(), open_again()]
    for number in range(8):
        gate = threading.Barrier(len(handles))
        answers = []

        def enqueue(handle: Ledger, key: str, gate: threading.Barrier = gate, answers: list = answers) -> None:  # type: ignore[type-arg]
            gate.wait()
            answers.extend(handle.enqueue([new_job(unique_key=key)]))

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
            ids.extend(answer.job_id for answer in handle.enqueue([new_job()] * 5))

    threads = [threading.Thread(target=enqueue, args=(handle,)) for handle in handles for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == len(set(ids)) == 600
    assert ledger.count_jobs() == {"pending": 600}


def test_payloads_of_a_mebibyte_come_back_unchanged(ledger: Ledger, w1: str) -> None:
    payload = bytes(range(256)) * 4096
    put(ledger, payload=payload)
    put(ledger, payload=payload[::-1])
    ledger.register(birth("w3"))
    assert [job.payload for job in claim(ledger)] == [payload, payload[::-1]]
