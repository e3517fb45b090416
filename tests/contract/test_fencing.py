"""The fence: every write about an attempt needs its token, its holder and the right state."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.builders import (
    birth,
    claim_jobs,
    crash,
    crash_retry,
    done,
    new_job,
    put,
    release,
    run,
    running,
    state_of,
    turn,
    verdict,
    wish,
)

from unstuck.domain.endings import Ending, Release
from unstuck.domain.states import FINAL_STATES, JobState, WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import GuardDead, GuardNone
from unstuck.ledger.contract.workers import AttemptRef, Claimed, ClaimRequest, Heartbeat, Output, Success, Turn
from unstuck.ledger.postgres import enqueue

WRITES = {
    "done": lambda job: {"done": [done(job)]},
    "ending": lambda job: {"endings": [crash(job)]},
    "retry": lambda job: {"endings": [crash_retry(job)]},
    "start": lambda job: {"start": [AttemptRef(job.job_id, job.token)]},
    "release": lambda job: {"release": [release(job)]},
}
every_write = pytest.mark.parametrize("write", WRITES, ids=str)


def with_token(job: Claimed, token: int) -> Claimed:
    return Claimed(job.job_id, token, *(getattr(job, name) for name in job.__struct_fields__[2:]))


def in_right_state(ledger: Ledger, write: str) -> Claimed:
    if write == "start":
        put(ledger)
        return claim_jobs(ledger)[0]
    return running(ledger)


@every_write
def test_a_wrong_token_writes_nothing(ledger: Ledger, w1: str, write: str) -> None:
    job = in_right_state(ledger, write)
    before = ledger.jobs.get(job.job_id)
    answer = turn(ledger, **WRITES[write](with_token(job, job.token + 1000)))
    assert answer.superseded == {(job.job_id, job.token + 1000)}
    assert ledger.jobs.get(job.job_id) == before
    assert ledger.events.list(job_id=job.job_id) == []


@every_write
def test_the_right_token_in_the_wrong_hands_writes_nothing(ledger: Ledger, w1: str, w2: str, write: str) -> None:
    job = in_right_state(ledger, write)
    before = ledger.jobs.get(job.job_id)
    answer = turn(ledger, "w2", **WRITES[write](job))
    assert answer.alive
    assert answer.superseded == {(job.job_id, job.token)}
    assert ledger.jobs.get(job.job_id) == before


@every_write
def test_a_finished_job_can_not_be_written_again(ledger: Ledger, w1: str, write: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job, b"the first")])
    before = ledger.jobs.get(job.job_id)
    assert turn(ledger, **WRITES[write](job)).superseded == {(job.job_id, job.token)}
    assert ledger.jobs.get(job.job_id) == before


@every_write
def test_a_zombie_can_not_touch_the_next_attempt_at_its_job(ledger: Ledger, w1: str, w2: str, write: str) -> None:
    old = running(ledger)
    turn(ledger, endings=[crash_retry(old)])
    [new] = run(ledger, "w2")
    assert new.token != old.token
    assert turn(ledger, "w1", **WRITES[write](old)).superseded == {(old.job_id, old.token)}
    assert turn(ledger, "w2", done=[done(new)]).superseded == frozenset()
    assert state_of(ledger, new.job_id) is JobState.SUCCEEDED


@every_write
def test_the_same_worker_can_not_use_the_token_of_its_earlier_attempt(ledger: Ledger, w1: str, write: str) -> None:
    old = running(ledger)
    turn(ledger, endings=[crash_retry(old)])
    [new] = run(ledger)
    assert turn(ledger, **WRITES[write](old)).superseded == {(old.job_id, old.token)}
    record = ledger.jobs.get(new.job_id)
    assert record is not None
    assert (record.state, record.token) == (JobState.RUNNING, new.token)


@pytest.mark.parametrize("write", ["done", "ending"])
def test_a_job_that_was_never_started_can_not_end(ledger: Ledger, w1: str, write: str) -> None:
    put(ledger)
    [job] = claim_jobs(ledger)
    assert turn(ledger, **WRITES[write](job)).superseded == {(job.job_id, job.token)}
    assert state_of(ledger, job.job_id) is JobState.CLAIMED


def test_a_running_job_can_not_be_started_again(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    before = ledger.jobs.get(job.job_id)
    assert turn(ledger, start=[AttemptRef(job.job_id, job.token)]).superseded == {(job.job_id, job.token)}
    assert ledger.jobs.get(job.job_id) == before


def test_a_job_that_does_not_exist_is_superseded(ledger: Ledger, w1: str) -> None:
    answer = turn(ledger, done=[Success(999, 1, b"")], start=[AttemptRef(998, 2)], release=[Release(997, 3)])
    assert answer.superseded == {(999, 1), (998, 2), (997, 3)}


def test_those_who_are_not_to_blame_are_written_beside_the_superseded(ledger: Ledger, w1: str) -> None:
    put(ledger), put(ledger), put(ledger)
    good, lost, also_good = run(ledger)
    turn(ledger, endings=[crash_retry(lost)])
    answer = turn(ledger, done=[done(good), done(lost), done(also_good)])
    assert answer.superseded == {(lost.job_id, lost.token)}
    assert [state_of(ledger, job.job_id) for job in (good, lost, also_good)] == [
        JobState.SUCCEEDED,
        JobState.PENDING,
        JobState.SUCCEEDED,
    ]


@pytest.mark.parametrize("end", ["condemned", "retired", "never born"])
def test_a_turn_of_the_dead_writes_nothing_and_claims_nothing(ledger: Ledger, w1: str, end: str) -> None:
    job = running(ledger)
    waiting = put(ledger)
    if end == "condemned":
        assert ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    elif end == "retired":
        ledger.workers.stop("w1")
    worker_id = "nobody" if end == "never born" else "w1"
    answer = ledger.workers.turn(
        Turn(
            worker_id,
            done=(done(job),),
            outputs=(Output(job.job_id, job.token, b"out", b""),),
            claim_request=ClaimRequest(("default",), ("add",), 10),
        )
    )
    assert not answer.alive
    assert answer.claimed == ()
    assert state_of(ledger, job.job_id) is JobState.RUNNING
    assert state_of(ledger, waiting) is JobState.PENDING
    assert ledger.jobs.outputs(job.job_id) == []


def test_an_idle_turn_of_the_dead_tells_it_so(ledger: Ledger, w1: str) -> None:
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert not ledger.workers.turn(Turn("w1", claim_request=ClaimRequest(("default",), ("add",), 10))).alive
    assert not ledger.workers.turn(Turn("w1")).alive


@pytest.mark.parametrize("state", ["suspect", "draining"])
def test_a_suspect_or_draining_worker_may_still_hand_in(ledger: Ledger, w1: str, state: str) -> None:
    job = running(ledger)
    if state == "suspect":
        ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    else:
        ledger.workers.drain("w1")
    answer = turn(ledger, done=[done(job)])
    assert answer.alive
    assert answer.superseded == frozenset()
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


@pytest.mark.parametrize("field", ["token", "worker"])
def test_the_reaper_is_fenced_like_everyone_else(ledger: Ledger, w1: str, w2: str, field: str) -> None:
    job = running(ledger)
    wrong: list[Ending] = [crash(with_token(job, job.token + 1) if field == "token" else job)]
    worker_id = "w1" if field == "token" else "w2"
    assert ledger.recovery.settle(worker_id, wrong, [], GuardNone()) == set()
    assert ledger.recovery.settle("w1", [crash(job)], [], GuardNone()) == {(job.job_id, job.token)}


def test_a_worker_that_comes_back_under_a_new_id_inherits_nothing(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.workers.register(birth("w1-again", name="name-of-w1"))
    assert ledger.workers.held("w1-again") == []
    assert turn(ledger, "w1-again", done=[done(job)]).superseded == {(job.job_id, job.token)}


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
    jobs = claim_jobs(ledger)
    lost = turn(ledger, start=[AttemptRef(job.job_id, job.token) for job in jobs]).superseded
    return [job for job in jobs if (job.job_id, job.token) not in lost]


def test_the_late_result_and_the_sweep_meet_and_exactly_one_wins(
    ledger: Ledger, w1: str, open_again: OpenLedger
) -> None:
    reaper = open_again()
    reaper.workers.list()
    for _ in range(ROUNDS):
        job = running(ledger)
        worker_lost: list[bool] = []
        reaper_won: list[bool] = []
        at_once(
            lambda job=job, lost=worker_lost: lost.append(bool(turn(ledger, done=[done(job)]).superseded)),
            lambda job=job, won=reaper_won: won.append(
                bool(reaper.recovery.settle("w1", [crash(job)], [], GuardNone()))
            ),
        )
        assert worker_lost == reaper_won
        expected = JobState.FAILED if reaper_won[0] else JobState.SUCCEEDED
        assert state_of(ledger, job.job_id) is expected
        assert len(ledger.jobs.attempts(job.job_id)) == 1


def test_two_watchmen_meet_and_the_job_is_requeued_once(ledger: Ledger, w1: str, open_again: OpenLedger) -> None:
    reapers = [open_again(), open_again()]
    for _ in range(ROUNDS):
        job = running(ledger)
        written: list[tuple[int, int]] = []
        at_once(
            *[
                lambda job=job, reaper=reaper, written=written: written.extend(
                    reaper.recovery.settle("w1", [crash_retry(job)], [], GuardNone())
                )
                for reaper in reapers
            ]
        )
        assert written == [(job.job_id, job.token)]
        record = ledger.jobs.get(job.job_id)
        assert record is not None
        assert (record.state, record.crash_count) == (JobState.PENDING, 1)
        assert [event.kind for event in ledger.events.list(job_id=job.job_id)] == ["requeued"]
        [again] = run(ledger)
        turn(ledger, done=[done(again)])


def test_a_turn_and_the_verdict_meet_and_nothing_is_held_unseen(ledger: Ledger, open_again: OpenLedger) -> None:
    """Either the verdict comes first and the turn is refused, or the sweep sees all that the turn took."""
    reaper = open_again()
    for number in range(ROUNDS):
        worker_id = f"victim-{number}"
        ledger.workers.register(birth(worker_id))
        ledger.jobs.enqueue([new_job() for _ in range(3)])
        swept: list[int] = []

        def sweep(worker_id: str = worker_id, swept: list[int] = swept) -> None:
            if reaper.recovery.declare_dead(worker_id, verdict(), GuardNone()):
                swept.extend(job.job_id for job in reaper.recovery.held_jobs(worker_id, 100))

        taken: list[int] = []

        def take(worker_id: str = worker_id, taken: list[int] = taken) -> None:
            taken.extend(job.job_id for job in wish(ledger, worker_id, 3).claimed)

        at_once(take, sweep)
        assert sorted(swept) == sorted(taken)
        held = reaper.recovery.held_jobs(worker_id, 100)
        reaper.recovery.settle(worker_id, [], [Release(job.job_id, job.token) for job in held], GuardDead())
    assert ledger.jobs.count() == {"pending": 3 * ROUNDS}


def test_a_beat_and_the_verdict_meet_and_they_agree_who_came_first(ledger: Ledger, open_again: OpenLedger) -> None:
    reaper = open_again()
    for number in range(ROUNDS):
        worker_id = f"victim-{number}"
        ledger.workers.register(birth(worker_id))
        answers: list[WorkerState] = []
        at_once(
            lambda worker_id=worker_id, answers=answers: answers.append(
                ledger.workers.beat(Heartbeat(worker_id, 0, 0)).state
            ),
            lambda worker_id=worker_id: reaper.recovery.declare_dead(worker_id, verdict(), GuardNone()),
        )
        assert ledger.workers.beat(Heartbeat(worker_id, 0, 0)).state is WorkerState.DEAD
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
            lambda job_id=job_id, answers=answers: answers.update(operator.jobs.cancel([job_id], "ops")),
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
            ledger.recovery.settle("w1", [crash(job)], [], GuardNone())
        assert state_of(ledger, job_id) in FINAL_STATES


@pytest.mark.parametrize("handles", [1, 3])
def test_one_ledger_object_serves_many_threads(ledger: Ledger, open_again: OpenLedger, handles: int) -> None:
    ledgers = [ledger, *(open_again() for _ in range(handles - 1))]
    ledger.workers.register(birth("w1"))

    def work(mine: Ledger, number: int) -> None:
        for _ in range(10):
            mine.jobs.enqueue([new_job()])
            mine.workers.beat(Heartbeat("w1", 0, number))
            for job in run_if_there(mine):
                turn(mine, done=[done(job)])
            mine.jobs.count()
            mine.recovery.watch()

    at_once(*[lambda mine=ledgers[n % handles], n=n: work(mine, n) for n in range(6)])
    for job in run_if_there(ledger):
        turn(ledger, done=[done(job)])
    assert ledger.jobs.count() == {"succeeded": 60}


def test_large_enqueues_with_the_same_keys_in_another_order_do_not_wait_for_each_other(
    ledger: Ledger, open_again: OpenLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_JOBS", 20)
    ledgers = (ledger, open_again())
    for n in range(10):
        keys = [f"{n} {word} {key}" for key in range(20) for word in ("a", "B", "é")]
        batches = [[new_job(unique_key=key) for key in order] for order in (keys, keys[::-1])]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda pair: pair[0].jobs.enqueue(pair[1]), zip(ledgers, batches, strict=True))
        assert [one.job_id for one in first] == [one.job_id for one in reversed(second)]
        assert all(a.fresh is not b.fresh for a, b in zip(first, reversed(second), strict=True))
