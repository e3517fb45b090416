"""Who gets what: order, queues, pauses, unknown tasks, run-ahead; and never two for one."""

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    QUEUE,
    TASK,
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
    start,
    state_of,
    turn,
    wish,
)
from tests.support.fleet import TIMEOUT_S

from unstuck.domain.endings import Release
from unstuck.domain.limits import QueueLimit
from unstuck.domain.states import JobState, Transport
from unstuck.http.auth.answers import AnswerBudget, AnswerRoom
from unstuck.http.workers.claims import ClientConnection, WakeUps, claim, handed_out_again, line_of
from unstuck.http.workers.turn_batcher import TurnBatcher
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import CLAIM_BYTES, AttemptRef, Claimed, ClaimRequest, JournalEntry, Turn
from unstuck.remote.registry import RemoteWorker


def test_first_come_first_served(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger) for _ in range(5)]
    assert [job.job_id for job in claim_jobs(ledger, limit=2)] == ids[:2]
    assert [job.job_id for job in claim_jobs(ledger, limit=10)] == ids[2:]


def test_higher_priority_goes_first_whenever_it_came(ledger: Ledger, w1: str) -> None:
    low, normal, high, highest = (put(ledger, priority=p) for p in (-1000, 0, 10, 1000))
    assert [job.job_id for job in claim_jobs(ledger)] == [highest, high, normal, low]


def test_several_queues_are_served_as_if_they_were_one_line(ledger: Ledger, w1: str) -> None:
    a1 = put(ledger, queue="a")
    b1 = put(ledger, queue="b")
    a2 = put(ledger, queue="a", priority=5)
    b2 = put(ledger, queue="b")
    put(ledger, queue="c")
    first = claim_jobs(ledger, limit=3, queues=("b", "a"))
    assert {job.job_id for job in first} == {a2, a1, b1}
    assert [job.job_id for job in claim_jobs(ledger, limit=3, queues=("b", "a"))] == [b2]


def test_one_full_queue_does_not_starve_another_of_the_same_rank(ledger: Ledger, w1: str) -> None:
    ledger.jobs.enqueue([new_job(queue="full") for _ in range(20)])
    late = put(ledger, queue="small", priority=1)
    assert late in {job.job_id for job in claim_jobs(ledger, limit=5, queues=("full", "small"))}


def test_a_claim_gives_what_the_worker_needs_to_know(ledger: Ledger, w1: str) -> None:
    put(ledger, payload=b"p", policy=b"{}")
    [job] = claim_jobs(ledger)
    assert (job.task, job.queue, job.payload, job.payload_type, job.policy) == ("add", "default", b"p", "json", b"{}")
    assert (job.running, job.failures, job.crashes, job.attempt) == (False, 0, 0, 1)
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.attempt) == (JobState.CLAIMED, "w1", job.token, 0)
    assert record.claimed_at is not None
    assert record.started_at is None


def test_what_slots_wait_for_is_started_in_the_commit_that_claims_it(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger), put(ledger, priority=1), put(ledger)]
    claimed = claim_jobs(ledger, limit=3, start=2)
    assert [(job.job_id, job.running, job.attempt) for job in claimed] == [
        (ids[1], True, 1),
        (ids[0], True, 1),
        (ids[2], False, 1),
    ]
    assert [state_of(ledger, job_id) for job_id in ids] == [JobState.RUNNING, JobState.RUNNING, JobState.CLAIMED]
    record = ledger.jobs.get(ids[0])
    assert record is not None
    assert record.started_at is not None
    assert record.attempt == 1


def test_a_job_of_a_task_that_this_worker_does_not_know_is_left_for_others(ledger: Ledger, w1: str, w2: str) -> None:
    unknown = put(ledger, task="from_the_next_release")
    known = put(ledger)
    assert [job.job_id for job in claim_jobs(ledger)] == [known]
    assert state_of(ledger, unknown) is JobState.PENDING
    assert [job.job_id for job in claim_jobs(ledger, "w2", tasks=("from_the_next_release",))] == [unknown]


def test_a_worker_without_tasks_or_queues_gets_nothing(ledger: Ledger, w1: str) -> None:
    put(ledger)
    assert claim_jobs(ledger, tasks=()) == []
    assert claim_jobs(ledger, queues=()) == []
    assert claim_jobs(ledger, limit=0) == []


def test_a_paused_queue_gives_nothing_until_it_is_resumed(ledger: Ledger, w1: str) -> None:
    paused = put(ledger, queue="a")
    other = put(ledger, queue="b")
    assert ledger.queues.pause("a", "ops") == ["a"]
    assert [job.job_id for job in claim_jobs(ledger, queues=("a", "b"))] == [other]
    assert claim_jobs(ledger, queues=("a",)) == []
    assert ledger.queues.resume("a", "ops") == ["a"]
    assert [job.job_id for job in claim_jobs(ledger, queues=("a",))] == [paused]


def test_run_ahead_makes_only_retryable_jobs_running_at_once(ledger: Ledger, w1: str) -> None:
    careful = put(ledger)
    hardy = put(ledger, on_crash="retry")
    jobs = {job.job_id: job for job in claim_jobs(ledger, run_ahead=True)}
    assert not jobs[careful].running
    assert jobs[hardy].running
    assert (state_of(ledger, careful), state_of(ledger, hardy)) == (JobState.CLAIMED, JobState.RUNNING)
    assert [jobs[careful].attempt, jobs[hardy].attempt] == [1, 1]
    record = ledger.jobs.get(hardy)
    assert record is not None
    assert record.attempt == 1
    assert record.started_at is not None


def test_without_run_ahead_nothing_runs_before_it_is_started(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry")
    assert [job.running for job in claim_jobs(ledger)] == [False]


def test_tokens_are_never_used_twice(ledger: Ledger, w1: str) -> None:
    put(ledger)
    seen = set()
    for _ in range(20):
        [job] = claim_jobs(ledger)
        assert job.token not in seen
        seen.add(job.token)
        turn(ledger, release=[release(job)])


def test_an_empty_ledger_says_that_nothing_is_due(ledger: Ledger, w1: str) -> None:
    answer = wish(ledger)
    assert answer.alive
    assert answer.claimed == ()
    assert answer.next_due_in_s is None


def test_two_crowds_of_claimers_never_get_the_same_job(ledger: Ledger, open_again: OpenLedger) -> None:
    ledger.jobs.enqueue([new_job(queue=queue) for queue in ("a", "b") for _ in range(150)])
    taken: list[int] = []
    handles = [ledger, open_again(), open_again(), open_again()]

    def drain(handle: Ledger, worker_id: str) -> None:
        handle.workers.register(birth(worker_id))
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
    ledger.jobs.enqueue([new_job(queue=queue) for queue in ("a", "b", "c") for _ in range(5)])
    assert len(claim_jobs(ledger, limit=limit, queues=("a", "b", "c"))) == limit


def test_a_turn_that_gives_a_job_back_and_takes_it_again_begins_the_second_attempt_after_the_first(
    ledger: Ledger, w1: str
) -> None:
    jobs = [running(ledger) for _ in range(20)]
    again = ledger.workers.turn(
        Turn(
            "w1",
            endings=tuple(crash_retry(job, counter="none") for job in jobs),
            claim_request=ClaimRequest(("default",), ("add",), 100, start=100),
        )
    )
    assert len(again.claimed) == len(jobs)
    for job in jobs:
        first, second = ledger.jobs.attempts(job.job_id)
        assert first.ended_at is not None
        assert second.started_at is not None
        assert first.ended_at <= second.started_at


def test_a_claim_says_for_how_long_the_job_had_been_due(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    late, scheduled = put(ledger), put(ledger, delay_s=100.0)
    meddler.age_job(late, 50.0)
    meddler.age_job(scheduled, 130.0)
    ledger.maintenance.promote_due(10)
    waited = {job.job_id: job.waited_s for job in claim_jobs(ledger)}
    assert waited[late] == pytest.approx(50.0, abs=20.0)
    assert waited[scheduled] == pytest.approx(30.0, abs=20.0)
    put(ledger)
    assert 0.0 <= claim_jobs(ledger)[0].waited_s < 20.0


LARGE = b'"' + b"x" * 1_000_000 + b'"'


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("queues", [("q",), ("q", "r")])
def test_what_is_claimed_at_once_fits_into_memory(
    ledger: Ledger, w1: str, queues: tuple[str, ...], limited: bool
) -> None:
    if limited:
        ledger.queues.limit(queues[0], QueueLimit(concurrency=100), "test")
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


def give_journal(ledger: Ledger, job_ids: list[int], what: str, value: bytes) -> None:
    """Write an entry into the journal of each of these jobs, as its first attempt, or send each a signal."""
    if what == "signals":
        assert [ledger.jobs.signal(job_id, "go", value, "test") for job_id in job_ids] == ["kept"] * len(job_ids)
        return
    for job in sorted(run(ledger, queues=("q", "r")), key=lambda job: job.job_id):
        entry = JournalEntry(job.job_id, job.token, 1, "step", "s", value)
        turn(ledger, entries=[entry], endings=[crash_retry(job)])


@pytest.mark.parametrize("what", ["entries", "signals"])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("queues", [("q",), ("q", "r")])
def test_the_journals_of_what_is_claimed_at_once_fit_into_memory(
    ledger: Ledger, w1: str, queues: tuple[str, ...], limited: bool, what: str
) -> None:
    if limited:
        ledger.queues.limit(queues[0], QueueLimit(concurrency=100), "test")
    ids = [put(ledger, queue=queues[number % len(queues)]) for number in range(20)]
    give_journal(ledger, ids, what, LARGE)
    plain = [put(ledger, queue=queues[0]) for _ in range(2)]
    taken: list[int] = []
    for _ in range(10):
        answer = wish(ledger, queues=queues, start=1000)
        assert sum(len(job.payload) + len(job.journal) for job in answer.claimed) <= 2 * CLAIM_BYTES
        taken += [job.job_id for job in answer.claimed]
        if not answer.more:
            break
        assert answer.claimed
        assert len(taken) < 20
    assert sorted(taken) == [*ids, *plain]


def test_a_job_with_a_journal_larger_than_all_may_be_together_is_claimed_alone(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger, queue="q") for _ in range(2)]
    give_journal(ledger, ids, "entries", LARGE * 9)
    first, second, rest = (wish(ledger, queues=("q",)) for _ in range(3))
    assert [[job.job_id for job in answer.claimed] for answer in (first, second, rest)] == [[ids[0]], [ids[1]], []]
    assert [answer.more for answer in (first, second, rest)] == [True, False, False]
    assert len(first.claimed[0].journal) > CLAIM_BYTES


def test_signals_that_were_taken_are_in_the_journal_and_counted_once(ledger: Ledger, w1: str) -> None:
    ids = [put(ledger, queue="q") for _ in range(7)]
    give_journal(ledger, ids, "signals", LARGE)
    for job in run(ledger, queues=("q",)):
        entry = JournalEntry(job.job_id, job.token, 1, "signal", "go", LARGE, 1)
        turn(ledger, entries=[entry], endings=[crash_retry(job)])
    answer = wish(ledger, queues=("q",))
    assert [job.job_id for job in answer.claimed] == ids
    assert not answer.more


def test_what_an_http_worker_is_handed_again_fits_into_memory(ledger: Ledger) -> None:
    """Its own claims were smaller: they are handed out again all at once."""
    ledger.workers.register(birth("w1", transport=Transport.HTTP, suspect_after_s=600, running_stale_after_s=600))
    worker = RemoteWorker("w1", "name-of-w1", None, ("q",), (TASK,), 30.0, 600.0)
    ids = [put(ledger, queue="q") for _ in range(20)]
    give_journal(ledger, ids, "signals", LARGE)
    while wish(ledger, queues=("q",)).claimed:
        pass
    tokens = {held.job_id: held.token for held in ledger.workers.held("w1")}
    assert sorted(tokens) == ids
    known: set[int] = set()
    rounds = []
    while jobs := handed_out_again(ledger, worker, frozenset(known), 100):
        rounds.append(len(jobs))
        known |= {job["token"] for job in jobs}
    assert known == set(tokens.values())
    assert max(rounds) * len(LARGE) <= CLAIM_BYTES


async def never() -> Any:
    await asyncio.Event().wait()


async def wanted() -> bool:
    return True


class Watched(ClientConnection):
    """A client that stays, and says when it has found nothing and rests."""

    def __init__(self) -> None:
        super().__init__(never)
        self.resting = asyncio.Event()

    async def rest(self, waiting: Awaitable[None], timeout_s: float) -> None:
        self.resting.set()
        await super().rest(waiting, timeout_s)


def test_whoever_is_told_something_gets_no_job_of_the_same_moment(ledger: Ledger) -> None:
    """An operator switches a worker off while it waits: a job that comes just then is for somebody else."""
    ledger.workers.register(birth("w1", transport=Transport.HTTP, suspect_after_s=600, running_stale_after_s=600))
    seat = RemoteWorker("w1", "name-of-w1", None, (QUEUE,), (TASK,), 30.0, 600.0)

    turns = TurnBatcher(lambda: ledger)

    async def scene() -> tuple[tuple[Claimed, ...], int]:
        wakeups, presence = WakeUps(TIMEOUT_S), Watched()
        with wakeups.wait_in(line_of(seat), seat.id) as waiter:
            room = AnswerRoom(AnswerBudget(), "mine")
            claiming = claim(
                turns.take,
                ledger,
                wakeups,
                waiter,
                seat,
                presence,
                room,
                wanted,
                limit=1,
                wait_s=TIMEOUT_S,
                start=False,
            )
            waiting = asyncio.create_task(claiming)
            await asyncio.wait_for(presence.resting.wait(), TIMEOUT_S)
            job_id = put(ledger)
            wakeups.heard(frozenset({"worker:w1", f"queue:{QUEUE}"}))
            got = await waiting
        presence.close()
        return got, job_id

    got, job_id = asyncio.run(scene())
    turns.close()
    record = ledger.jobs.get(job_id)
    assert got == ()
    assert record is not None
    assert record.state is JobState.PENDING


def lost_and_found(ledger: Ledger) -> tuple[Claimed, Claimed]:
    ledger.workers.register(birth("w1"))
    put(ledger)
    [old] = run(ledger)
    assert ledger.recovery.settle("w1", [], [Release(old.job_id, old.token)], GuardNone())
    [new] = claim_jobs(ledger)
    return old, new


def test_of_two_starts_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    answer = turn(ledger, start=[AttemptRef(old.job_id, old.token), AttemptRef(new.job_id, new.token)])
    assert answer.superseded == {(old.job_id, old.token)}


def test_of_two_successes_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    start(ledger, [new])
    answer = turn(ledger, done=[done(old, b"old"), done(new, b"new")])
    assert answer.superseded == {(old.job_id, old.token)}
    assert ledger.jobs.outcomes([new.job_id])[0].result == b"new"


def test_of_two_endings_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    start(ledger, [new])
    assert turn(ledger, endings=[crash(old), crash(new)]).superseded == {(old.job_id, old.token)}
