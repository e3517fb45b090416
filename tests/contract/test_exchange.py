"""What happens at a broker between two looks at its sockets is one commit: all of it or nothing."""

import threading
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    QUEUE,
    TASK,
    birth,
    done,
    failure,
    new_job,
    put,
    release,
    run,
    running,
    state_of,
    verdict,
)

from unstuck import failpoints
from unstuck.domain.states import JobState, Transport, WorkerState
from unstuck.errors import RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Enqueued, Request
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import (
    AttemptRef,
    ClaimRequest,
    Exchange,
    ExchangeAnswer,
    OnceJob,
    RemoteHeartbeat,
    ReplyAddress,
    Success,
    Turn,
    TurnAnswer,
)

CLIENT = b"client-0123456789"
OTHER = b"other--0123456789"
DAY_S = 86400.0
WISH = ClaimRequest((QUEUE,), (TASK,), 1, start=1)


def letter(client: bytes = CLIENT, **changes: Any) -> ReplyAddress:
    facts: dict[str, Any] = {"client": client, "service": "echo", "request_id": "r1"}
    return ReplyAddress(**{**facts, **changes})


def once(key: bytes = b"k", fingerprint: bytes = b"f", **more: Any) -> OnceJob:
    return OnceJob(Request(key, fingerprint, DAY_S), new_job(), **more)


def exchange(ledger: Ledger, **parts: Any) -> ExchangeAnswer:
    return ledger.workers.exchange(Exchange(**{name: tuple(value) for name, value in parts.items()}))


def turns_of(answer: ExchangeAnswer) -> tuple[TurnAnswer, ...]:
    assert answer.turns is not None
    return answer.turns


@pytest.fixture
def f1(ledger: Ledger) -> str:
    """A living foreign worker, of the kind that a broker speaks for."""
    ledger.workers.register(birth("f1", transport=Transport.MDP, suspect_after_s=600, running_stale_after_s=600))
    return "f1"


def test_a_job_is_taken_in_and_handed_out_in_one_exchange(ledger: Ledger, w1: str, w2: str) -> None:
    answer = exchange(
        ledger,
        jobs=[new_job(), new_job(), new_job()],
        turns=[Turn("w1", claim_request=WISH), Turn("w2", claim_request=WISH)],
    )
    ids = [one.job_id for one in answer.enqueued]
    assert ids == sorted(ids)
    assert [one.fresh for one in answer.enqueued] == [True, True, True]
    assert [[job.job_id for job in one.claimed] for one in turns_of(answer)] == [[ids[0]], [ids[1]]]
    assert [state_of(ledger, job_id) for job_id in ids] == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]


def test_every_turn_is_done_as_if_it_were_alone(ledger: Ledger, w1: str, w2: str) -> None:
    first, second, third, fourth = (running(ledger) for _ in range(4))
    [kept] = [put(ledger)]
    answer = exchange(
        ledger,
        turns=[
            Turn("w1", done=(done(first),), endings=(failure(second),), release=(release(third),)),
            Turn("w2", done=(done(fourth),), claim_request=ClaimRequest((QUEUE,), (TASK,), 5, start=1)),
        ],
    )
    one, two = turns_of(answer)
    assert one == TurnAnswer(True)
    # Not its own: superseded, as in a turn of its own.
    assert two.superseded == {(fourth.job_id, fourth.token)}
    assert [(job.job_id, job.running) for job in two.claimed] == [(third.job_id, True), (kept, False)]
    assert [state_of(ledger, job.job_id) for job in (first, second, fourth)] == [
        *(JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING)
    ]
    [started] = turns_of(exchange(ledger, turns=[Turn("w2", start=(AttemptRef(kept, two.claimed[1].token),))]))
    assert started == TurnAnswer(True)
    assert state_of(ledger, kept) is JobState.RUNNING


def test_a_dead_worker_does_not_undo_the_others(ledger: Ledger, w1: str, w2: str) -> None:
    lost, mine = running(ledger, "w1"), running(ledger, "w2")
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    answer = exchange(
        ledger,
        jobs=[new_job()],
        turns=[Turn("w1", done=(done(lost),), claim_request=WISH), Turn("w2", done=(done(mine),), claim_request=WISH)],
    )
    dead, alive = turns_of(answer)
    assert dead == TurnAnswer(alive=False)
    assert [job.job_id for job in alive.claimed] == [answer.enqueued[0].job_id]
    assert state_of(ledger, mine.job_id) is JobState.SUCCEEDED
    assert state_of(ledger, lost.job_id) is JobState.RUNNING


@pytest.mark.parametrize(
    "wrong",
    [
        {"jobs": (new_job(task="nul\0"),)},
        {"jobs": (new_job(priority=5000),)},
        {"jobs": (new_job(),), "reply_addresses": (letter(own_id="nul\0"),)},
        {"jobs": (new_job(),), "reply_addresses": (letter(request_id="\ud800"),)},
        {"jobs": (new_job(),), "reply_addresses": (letter(b"short"),)},
        {"jobs": (new_job(),), "reply_addresses": (letter(place=2, places=2),)},
        {"once": (once(reply_address=letter(service="\ud800")),)},
        {"once": (once(reply_address=letter(service="nul\0")),)},
    ],
)
def test_what_cannot_be_stored_takes_the_whole_exchange_with_it(ledger: Ledger, w1: str, wrong: dict[str, Any]) -> None:
    job = running(ledger)
    held = [(one.job_id, one.token) for one in ledger.workers.held("w1")]
    parts = {"jobs": (new_job(),), "reply_addresses": (), **wrong}
    with pytest.raises(RefusedValue):
        ledger.workers.exchange(Exchange(turns=(Turn("w1", done=(done(job),)),), **parts))
    assert [(one.job_id, one.token) for one in ledger.workers.held("w1")] == held
    assert ledger.jobs.count() == {"running": 1}
    assert ledger.workers.reply_addresses(CLIENT) == []
    # Nothing is left open: the next one goes through.
    assert turns_of(exchange(ledger, turns=[Turn("w1", done=(done(job),))])) == (TurnAnswer(True),)
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


def test_an_ending_that_cannot_be_stored_undoes_what_came_before_it(ledger: Ledger, w1: str, w2: str) -> None:
    good, bad = running(ledger, "w1"), running(ledger, "w2")
    with pytest.raises(RefusedValue):
        exchange(
            ledger,
            jobs=[new_job()],
            turns=[Turn("w1", done=(done(good),)), Turn("w2", endings=(failure(bad, message="nul\0"),))],
        )
    assert ledger.jobs.count() == {"running": 2}


def test_unique_keys_keep_their_meaning(ledger: Ledger) -> None:
    there = put(ledger, unique_key="u")
    answer = exchange(
        ledger, jobs=[new_job(unique_key="u"), new_job(), new_job(unique_key="v"), new_job(unique_key="v")]
    )
    first, second, third, fourth = answer.enqueued
    assert first == Enqueued(there, fresh=False)
    assert second.fresh
    assert third.fresh
    assert fourth == Enqueued(third.job_id, fresh=False)
    assert ledger.jobs.count() == {"pending": 3}


def test_beats_are_answered_in_their_order(ledger: Ledger, f1: str) -> None:
    ledger.workers.register(birth("f2", transport=Transport.MDP))
    ledger.recovery.declare_dead("f2", verdict(WorkerState.SUSPECT), GuardNone())
    ledger.workers.request("f1", "drain", "me")
    pulses = [
        RemoteHeartbeat("f2", running=3, metadata={"a": 1}),
        RemoteHeartbeat("nobody"),
        RemoteHeartbeat("f1", settled=2),
    ]
    for extra in ({}, {"jobs": [new_job()]}, {"turns": [Turn("f1", claim_request=WISH)]}):
        answer = exchange(ledger, heartbeats=pulses, **extra)
        assert [beat.state for beat in answer.heartbeats] == [WorkerState.ACTIVE, WorkerState.DEAD, WorkerState.ACTIVE]
        assert answer.heartbeats[2].request == "drain"
    assert {worker.id: (worker.running, worker.processed) for worker in ledger.workers.list()} == {
        "f1": (0, 6),
        "f2": (3, 0),
    }


def test_an_empty_exchange_is_answered_with_nothing(ledger: Ledger) -> None:
    assert ledger.workers.exchange(Exchange()) == ExchangeAnswer()


def test_wishes_that_find_nothing_say_when_to_come_again(ledger: Ledger, w1: str, w2: str) -> None:
    ledger.recovery.declare_dead("w2", verdict(), GuardNone())
    put(ledger, delay_s=600)
    idle, dead = turns_of(exchange(ledger, turns=[Turn("w1", claim_request=WISH), Turn("w2", claim_request=WISH)]))
    assert idle.alive
    assert idle.next_due_in_s == pytest.approx(600, abs=60)
    assert dead == TurnAnswer(alive=False)


def test_a_process_that_is_lost_before_the_commit_leaves_nothing_and_after_it_all(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    parts = {"jobs": [new_job()], "reply_addresses": [letter()], "turns": [Turn("w1", done=(done(job),))]}
    for point, counted in (("before", {"running": 1}), ("after", {"pending": 1, "succeeded": 1})):
        failpoints.arm(f"exchange.{point}_commit=raise")
        try:
            with pytest.raises(failpoints.FailpointHit):
                exchange(ledger, **parts)
        finally:
            failpoints.arm("")
        assert ledger.jobs.count() == counted
        assert len(ledger.workers.reply_addresses(CLIENT)) == counted.get("pending", 0)


# Letters ------------------------------------------------------------------------------------


def test_a_letter_is_found_by_its_job_and_by_its_client(ledger: Ledger) -> None:
    full = letter(place=1, places=3, correlation=b"\0c", own_id="mine", notify=True)
    answer = exchange(
        ledger, jobs=[new_job(), new_job(), new_job(), new_job()], reply_addresses=[full, None, letter(OTHER), letter()]
    )
    ids = [one.job_id for one in answer.enqueued]
    assert ledger.workers.reply_address(ids[0]) == ReplyAddress(
        CLIENT, "echo", "r1", 1, 3, correlation=b"\0c", own_id="mine", notify=True, job_id=ids[0]
    )
    assert ledger.workers.reply_address(ids[1]) is None
    assert [one.job_id for one in ledger.workers.reply_addresses(CLIENT)] == [ids[0], ids[3]]
    assert [one.job_id for one in ledger.workers.reply_addresses(CLIENT, limit=1)] == [ids[0]]
    assert [one.job_id for one in ledger.workers.reply_addresses(CLIENT, after_job_id=ids[0])] == [ids[3]]
    assert [one.job_id for one in ledger.workers.reply_addresses(OTHER)] == [ids[2]]
    with pytest.raises(RefusedValue):
        ledger.workers.reply_addresses(CLIENT, after_job_id=2**63)


def test_what_was_answered_is_not_found_by_its_client_any_more(ledger: Ledger) -> None:
    first, second = exchange(ledger, jobs=[new_job(), new_job()], reply_addresses=[letter(), letter()]).enqueued
    exchange(ledger, answered=[first.job_id, 999_999])
    assert [one.job_id for one in ledger.workers.reply_addresses(CLIENT)] == [second.job_id]
    answered = ledger.workers.reply_address(first.job_id)
    assert answered is not None
    assert answered.answered_at is not None
    # Once is enough, and the first time counts.
    exchange(ledger, answered=[first.job_id])
    assert ledger.workers.reply_address(first.job_id) == answered


def test_who_comes_back_with_the_same_unique_key_gets_the_answer(ledger: Ledger) -> None:
    [first] = exchange(ledger, jobs=[new_job(unique_key="u")], reply_addresses=[letter()]).enqueued
    # The old one is answered in the very exchange in which the new one comes: it must not be taken for answered.
    [again] = exchange(
        ledger,
        answered=[first.job_id],
        jobs=[new_job(unique_key="u")],
        reply_addresses=[letter(OTHER, request_id="r2")],
    ).enqueued
    assert again == Enqueued(first.job_id, fresh=False)
    assert ledger.workers.reply_addresses(CLIENT) == []
    assert ledger.workers.reply_addresses(OTHER) == [letter(OTHER, request_id="r2", job_id=first.job_id)]
    # Of two that come at once the last is answered.
    exchange(ledger, jobs=[new_job(unique_key="u")] * 2, reply_addresses=[letter(OTHER), letter(CLIENT)])
    assert [
        one.client for one in (*ledger.workers.reply_addresses(CLIENT), *ledger.workers.reply_addresses(OTHER))
    ] == [CLIENT]


def test_letters_go_with_their_jobs(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    exchange(ledger, jobs=[new_job(), new_job(), new_job()], reply_addresses=[letter()] * 3)
    pruned, swept, _ = run(ledger)
    exchange(ledger, turns=[Turn("w1", done=(done(pruned),))])
    assert ledger.maintenance.prune(0.0) == 1
    assert meddler.count("reply_addresses") == 2
    exchange(ledger, turns=[Turn("w1", done=(done(swept),))])
    assert ledger.maintenance.sweep_old(0.0, DAY_S, DAY_S, 100).jobs == 1
    assert meddler.count("reply_addresses") == 1
    assert len(ledger.workers.reply_addresses(CLIENT)) == 1


def test_a_purged_job_keeps_its_letter(ledger: Ledger) -> None:
    """Its client has still to be told."""
    exchange(ledger, jobs=[new_job()], reply_addresses=[letter()])
    assert ledger.queues.purge(QUEUE, "me") == 1
    assert len(ledger.workers.reply_addresses(CLIENT)) == 1


# Once ---------------------------------------------------------------------------------------


def test_a_request_that_comes_again_gets_the_job_of_the_first_also_when_that_ended(ledger: Ledger, w1: str) -> None:
    answer = exchange(ledger, once=[once(reply_address=letter())], turns=[Turn("w1", claim_request=WISH)])
    [first] = answer.once
    [job] = turns_of(answer)[0].claimed
    assert first == Enqueued(job.job_id, fresh=True)
    exchange(ledger, answered=[job.job_id], turns=[Turn("w1", done=(done(job),))])
    again = exchange(ledger, once=[once(reply_address=letter(OTHER)), once(b"new")])
    assert again.once[0] == Enqueued(job.job_id, fresh=False)
    assert again.once[1] is not None
    assert again.once[1].fresh
    assert ledger.workers.reply_addresses(OTHER) == [letter(OTHER, job_id=job.job_id)]
    assert ledger.workers.reply_addresses(CLIENT) == []


def test_a_request_whose_job_was_removed_is_still_known_and_leaves_no_letter(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    [first] = exchange(ledger, once=[once(reply_address=letter())]).once
    [job] = run(ledger)
    exchange(ledger, turns=[Turn("w1", done=(done(job),))])
    assert ledger.maintenance.prune(0.0) == 1
    assert exchange(ledger, once=[once(reply_address=letter())]).once == (Enqueued(job.job_id, fresh=False),)
    assert first == Enqueued(job.job_id)
    assert meddler.count("reply_addresses") == 0


def test_a_key_that_comes_with_something_else_stores_nothing(ledger: Ledger) -> None:
    [first] = exchange(ledger, once=[once(reply_address=letter())]).once
    answer = exchange(ledger, once=[once(b"a"), once(fingerprint=b"g", reply_address=letter(OTHER)), once(b"z")])
    assert [one is not None and one.fresh for one in answer.once] == [True, False, True]
    assert answer.once[1] is None
    assert ledger.workers.reply_addresses(OTHER) == []
    assert (
        [one.job_id for one in ledger.workers.reply_addresses(CLIENT)] == [first.job_id] if first is not None else False
    )


def test_a_key_that_comes_twice_in_one_exchange_is_one_job(ledger: Ledger) -> None:
    first, other, again = exchange(ledger, once=[once(b"z"), once(b"a"), once(b"z")]).once
    assert first is not None
    assert other is not None
    assert again == Enqueued(first.job_id, fresh=False)
    # The keys are taken in their own order, and the jobs stand in the order in which they came.
    assert first.job_id < other.job_id
    assert ledger.jobs.count() == {"pending": 2}


def test_keys_of_an_exchange_and_of_plain_requests_are_the_same_keys(ledger: Ledger) -> None:
    [first] = ledger.jobs.enqueue_once(Request(b"k", b"f", DAY_S), [new_job()]).stored
    assert exchange(ledger, once=[once()]).once == (Enqueued(first.job_id, fresh=False),)


# Beside one another ---------------------------------------------------------------------------


def test_brokers_beside_one_another_hand_out_every_job_once(ledger: Ledger, open_again: OpenLedger) -> None:
    """With unique keys, request keys and workers in opposite orders, so that they are in each other's way."""
    rounds, brokers = 15, 3
    finished: list[int] = []
    errors: list[BaseException] = []
    for broker in range(brokers):
        for worker in range(2):
            ledger.workers.register(birth(f"b{broker}-{worker}", suspect_after_s=600, running_stale_after_s=600))

    def serve(mine: Ledger, broker: int) -> None:
        workers = [f"b{broker}-{worker}" for worker in range(2)]
        hands: dict[str, tuple[Success, ...]] = dict.fromkeys(workers, ())
        try:
            for n in range(rounds):
                keys = [f"u{n}", f"u{n + 1}"][:: 1 if broker % 2 else -1]
                answer = mine.workers.exchange(
                    Exchange(
                        jobs=(new_job(), *(new_job(unique_key=key) for key in keys)),
                        reply_addresses=(letter(), letter(), letter()),
                        once=tuple(once(key.encode(), reply_address=letter()) for key in keys),
                        turns=tuple(
                            Turn(worker, done=hands[worker], claim_request=ClaimRequest((QUEUE,), (TASK,), 3, start=3))
                            for worker in workers
                        ),
                    )
                )
                for worker, turn in zip(workers, turns_of(answer), strict=True):
                    assert turn.alive
                    assert not turn.superseded
                    hands[worker] = tuple(done(job) for job in turn.claimed)
                    finished.extend(job.job_id for job in turn.claimed)
            last = mine.workers.exchange(Exchange(turns=tuple(Turn(worker, done=hands[worker]) for worker in workers)))
            assert all(not turn.superseded for turn in turns_of(last))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(open_again(), broker)) for broker in range(brokers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(finished) == len(set(finished))
    assert ledger.jobs.count().get("running") is None
    assert ledger.jobs.count().get("succeeded") == len(finished)
