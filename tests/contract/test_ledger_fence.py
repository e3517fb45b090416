"""The fence: every write about an attempt needs its token, its holder and the right state."""

import pytest
from tests.contract.hands import (
    birth,
    claim,
    crash,
    crash_retry,
    done,
    put,
    release,
    run,
    running,
    state_of,
    turn,
    verdict,
)

from unstuck.domain.endings import Ending, Release
from unstuck.domain.states import JobState, WorkerState
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, Done, GuardNone, Held, Output, Turn, Wish

WRITES = {
    "done": lambda job: {"done": [done(job)]},
    "ending": lambda job: {"endings": [crash(job)]},
    "retry": lambda job: {"endings": [crash_retry(job)]},
    "start": lambda job: {"start": [Held(job.job_id, job.token)]},
    "release": lambda job: {"release": [release(job)]},
}
every_write = pytest.mark.parametrize("write", WRITES, ids=str)


def with_token(job: Claimed, token: int) -> Claimed:
    return Claimed(job.job_id, token, *(getattr(job, name) for name in job.__struct_fields__[2:]))


def in_right_state(ledger: Ledger, write: str) -> Claimed:
    if write == "start":
        put(ledger)
        return claim(ledger)[0]
    return running(ledger)


@every_write
def test_a_wrong_token_writes_nothing(ledger: Ledger, w1: str, write: str) -> None:
    job = in_right_state(ledger, write)
    before = ledger.job(job.job_id)
    answer = turn(ledger, **WRITES[write](with_token(job, job.token + 1000)))
    assert answer.superseded == {(job.job_id, job.token + 1000)}
    assert ledger.job(job.job_id) == before
    assert ledger.events(job_id=job.job_id) == []


@every_write
def test_the_right_token_in_the_wrong_hands_writes_nothing(ledger: Ledger, w1: str, w2: str, write: str) -> None:
    job = in_right_state(ledger, write)
    before = ledger.job(job.job_id)
    answer = turn(ledger, "w2", **WRITES[write](job))
    assert answer.alive
    assert answer.superseded == {(job.job_id, job.token)}
    assert ledger.job(job.job_id) == before


@every_write
def test_a_finished_job_can_not_be_written_again(ledger: Ledger, w1: str, write: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job, b"the first")])
    before = ledger.job(job.job_id)
    assert turn(ledger, **WRITES[write](job)).superseded == {(job.job_id, job.token)}
    assert ledger.job(job.job_id) == before


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
    record = ledger.job(new.job_id)
    assert record is not None
    assert (record.state, record.token) == (JobState.RUNNING, new.token)


@pytest.mark.parametrize("write", ["done", "ending"])
def test_a_job_that_was_never_started_can_not_end(ledger: Ledger, w1: str, write: str) -> None:
    put(ledger)
    [job] = claim(ledger)
    assert turn(ledger, **WRITES[write](job)).superseded == {(job.job_id, job.token)}
    assert state_of(ledger, job.job_id) is JobState.CLAIMED


def test_a_running_job_can_not_be_started_again(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    before = ledger.job(job.job_id)
    assert turn(ledger, start=[Held(job.job_id, job.token)]).superseded == {(job.job_id, job.token)}
    assert ledger.job(job.job_id) == before


def test_a_job_that_does_not_exist_is_superseded(ledger: Ledger, w1: str) -> None:
    answer = turn(ledger, done=[Done(999, 1, b"")], start=[Held(998, 2)], release=[Release(997, 3)])
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
        assert ledger.condemn("w1", verdict(), GuardNone())
    elif end == "retired":
        ledger.retire("w1")
    worker_id = "nobody" if end == "never born" else "w1"
    answer = ledger.turn(
        Turn(
            worker_id,
            done=(done(job),),
            outputs=(Output(job.job_id, job.token, b"out", b""),),
            wish=Wish(("default",), ("add",), 10),
        )
    )
    assert not answer.alive
    assert answer.claimed == ()
    assert state_of(ledger, job.job_id) is JobState.RUNNING
    assert state_of(ledger, waiting) is JobState.PENDING
    assert ledger.outputs(job.job_id) == []


def test_an_idle_turn_of_the_dead_tells_it_so(ledger: Ledger, w1: str) -> None:
    ledger.condemn("w1", verdict(), GuardNone())
    assert not ledger.turn(Turn("w1", wish=Wish(("default",), ("add",), 10))).alive
    assert not ledger.turn(Turn("w1")).alive


@pytest.mark.parametrize("state", ["suspect", "draining"])
def test_a_suspect_or_draining_worker_may_still_hand_in(ledger: Ledger, w1: str, state: str) -> None:
    job = running(ledger)
    if state == "suspect":
        ledger.condemn("w1", verdict(WorkerState.SUSPECT), GuardNone())
    else:
        ledger.drain("w1")
    answer = turn(ledger, done=[done(job)])
    assert answer.alive
    assert answer.superseded == frozenset()
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


@pytest.mark.parametrize("field", ["token", "worker"])
def test_the_reaper_is_fenced_like_everyone_else(ledger: Ledger, w1: str, w2: str, field: str) -> None:
    job = running(ledger)
    wrong: list[Ending] = [crash(with_token(job, job.token + 1) if field == "token" else job)]
    worker_id = "w1" if field == "token" else "w2"
    assert ledger.settle(worker_id, wrong, [], GuardNone()) == set()
    assert ledger.settle("w1", [crash(job)], [], GuardNone()) == {(job.job_id, job.token)}


def test_a_worker_that_comes_back_under_a_new_id_inherits_nothing(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.register(birth("w1-again", name="name-of-w1"))
    assert ledger.held("w1-again") == []
    assert turn(ledger, "w1-again", done=[done(job)]).superseded == {(job.job_id, job.token)}
