"""Thousands of jobs that a worker may not take stand in its way: it goes around them, and still misses nothing."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, crash_retry, done, new_job, put, release, run, turn
from tests.support.fleet import wait_for

from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import ClaimRequest
from unstuck.ledger.gaps import Gap
from unstuck.ledger.sqlite import claim

CROWD = 4_000
PORTION = 500
"""How many jobs one statement writes: a server that is busy with other tests may take seconds for a whole crowd, and
ends what takes longer than a worker waits for."""
UNKNOWN = "from_the_next_release"


@pytest.fixture(autouse=True)
def every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite a look that took little CPU is not asked what it read past, and how much a crowd costs depends on the
    machine: here the numbers alone decide."""
    monkeypatch.setattr(claim, "LONG_LOOK_S", -1.0)


def crowd(ledger: Ledger, **changes: Any) -> list[int]:
    """Put thousands of jobs of an unknown task into the queue."""
    portion = [new_job(task=UNKNOWN, **changes) for _ in range(PORTION)]
    return [answer.job_id for _ in range(CROWD // PORTION) for answer in ledger.jobs.enqueue(portion)]


def gaps(ledger: Any, tasks: tuple[str, ...] = ("add",), queues: tuple[str, ...] = ("default",)) -> tuple[Gap, ...]:
    """Give the gaps that this ledger object goes around."""
    found: tuple[Gap, ...] = ledger.gaps.of(ClaimRequest(queues, tasks, 1), 0.0)
    return found


def is_inside(gap: Gap, job_id: int, rank: int = 0) -> bool:
    return gap.from_rank <= rank and (rank, job_id) <= (gap.to_rank, gap.to_id)


def ids(jobs: list[Any]) -> list[int]:
    return [job.job_id for job in jobs]


def test_a_crowd_of_an_unknown_task_does_not_hide_what_comes_after_it(ledger: Ledger, w1: str) -> None:
    crowd(ledger)
    first = [put(ledger) for _ in range(5)]
    assert ids(claim_jobs(ledger, limit=3)) == first[:3]
    assert gaps(ledger)
    assert ids(claim_jobs(ledger)) == first[3:]
    assert claim_jobs(ledger) == []
    later = put(ledger)
    assert ids(claim_jobs(ledger)) == [later]


def test_an_idle_worker_learns_to_go_around_a_crowd(ledger: Ledger, w1: str) -> None:
    crowd(ledger)
    assert claim_jobs(ledger) == []
    assert gaps(ledger)
    job_id = put(ledger)
    assert ids(claim_jobs(ledger)) == [job_id]


def test_a_few_unknown_jobs_are_no_gap(ledger: Ledger, w1: str) -> None:
    # In a queue of its own: on PostgreSQL what other tests left behind would count, as it does in life.
    ledger.jobs.enqueue([new_job(task=UNKNOWN, queue="quiet") for _ in range(1500)])
    put(ledger, queue="quiet")
    assert len(claim_jobs(ledger, queues=("quiet",))) == 1
    assert claim_jobs(ledger, queues=("quiet",)) == []
    assert gaps(ledger, queues=("quiet",)) == ()


def test_nothing_is_missed_where_known_and_unknown_stand_mixed(ledger: Ledger, w1: str) -> None:
    known: list[int] = []
    for _ in range(3):
        ledger.jobs.enqueue([new_job(task=UNKNOWN) for _ in range(4000)])
        known += [put(ledger) for _ in range(10)]
    taken: list[int] = []
    wait_for(
        lambda: taken.extend(ids(claim_jobs(ledger, limit=7))) or len(taken) >= len(known), "every known job taken"
    )
    assert taken == known


@pytest.mark.parametrize("limit", [1, 100])
def test_a_higher_priority_goes_before_the_gap_at_once(ledger: Ledger, w1: str, limit: int) -> None:
    crowd(ledger)
    put(ledger)
    # A claim of one finds what it wished for and is not told that there is no more.
    assert len(claim_jobs(ledger, limit=limit)) == 1
    assert gaps(ledger)
    waiting = put(ledger)
    urgent = put(ledger, priority=5)
    # One by one: within one answer PostgreSQL gives them in the order in which it wrote them.
    assert [ids(claim_jobs(ledger, limit=1)) for _ in range(2)] == [[urgent], [waiting]]


def test_a_crowd_of_lower_priority_does_not_delay_what_goes_before_it(ledger: Ledger, w1: str) -> None:
    stray = put(ledger, task=UNKNOWN, priority=3)
    crowd(ledger, priority=-5)
    assert claim_jobs(ledger) == []
    [gap] = gaps(ledger)
    job_id = put(ledger)
    assert not is_inside(gap, job_id)
    assert not is_inside(gap, stray, rank=-3)
    assert ids(claim_jobs(ledger)) == [job_id]


def test_a_priority_inside_the_gap_is_found_in_time(ledger: Ledger, w1: str) -> None:
    crowd(ledger, priority=5)
    crowd(ledger, priority=-5)
    assert claim_jobs(ledger) == []
    [gap] = gaps(ledger)
    job_id = put(ledger)
    assert is_inside(gap, job_id)
    assert ids(wait_for(lambda: claim_jobs(ledger), "the job inside the gap is found")) == [job_id]


def give_back(ledger: Ledger, meddler: Backdoor, job: Any) -> None:
    turn(ledger, release=[release(job)])


def retry(ledger: Ledger, meddler: Backdoor, job: Any) -> None:
    turn(ledger, endings=[crash_retry(job)])


def promote(ledger: Ledger, meddler: Backdoor, job: Any) -> None:
    turn(ledger, endings=[crash_retry(job, delay_s=60)])
    meddler.age_job(job.job_id, 61)
    assert ledger.maintenance.promote_due(10).count == 1


@pytest.mark.parametrize("return_it", [give_back, retry, promote])
def test_an_older_job_that_comes_back_into_the_gap_is_found_in_time(
    ledger: Ledger, w1: str, meddler: Backdoor, return_it: Callable[[Ledger, Backdoor, Any], None]
) -> None:
    put(ledger)
    [old] = run(ledger)
    crowd(ledger)
    assert claim_jobs(ledger) == []
    [gap] = gaps(ledger)
    assert is_inside(gap, old.job_id)
    return_it(ledger, meddler, old)
    newer = put(ledger)
    taken: list[int] = []
    wait_for(lambda: taken.extend(ids(claim_jobs(ledger))) or len(taken) == 2, "both jobs are found")
    assert set(taken) == {old.job_id, newer}


def test_a_worker_that_knows_the_task_takes_it_through_the_same_ledger(ledger: Ledger, w1: str, w2: str) -> None:
    unknown = crowd(ledger)
    known = put(ledger)
    assert ids(claim_jobs(ledger)) == [known]
    assert gaps(ledger)
    assert ids(claim_jobs(ledger, "w2", limit=3, tasks=(UNKNOWN,))) == unknown[:3]
    # As after a deploy: the same worker process with a longer list.
    assert ids(claim_jobs(ledger, limit=2, tasks=("add", UNKNOWN))) == unknown[3:5]
    assert gaps(ledger, tasks=(UNKNOWN,)) == ()


def test_a_gap_is_forgotten_when_the_crowd_is_gone(ledger: Ledger, w1: str, w2: str) -> None:
    crowd(ledger)
    assert claim_jobs(ledger) == []
    assert gaps(ledger)
    gone = 0
    while jobs := run(ledger, "w2", limit=PORTION, tasks=(UNKNOWN,)):
        turn(ledger, "w2", done=[done(job) for job in jobs])
        gone += len(jobs)
    assert gone == CROWD
    wait_for(lambda: claim_jobs(ledger) == [] and gaps(ledger) == (), "the gap is forgotten")


def test_a_paused_queue_with_a_gap_gives_nothing_and_then_all(ledger: Ledger, w1: str) -> None:
    put(ledger)
    [old] = run(ledger)
    crowd(ledger)
    assert claim_jobs(ledger) == []
    ledger.queues.pause("default", "ops")
    turn(ledger, release=[release(old)])
    newer = put(ledger)
    assert claim_jobs(ledger) == []
    ledger.queues.resume("default", "ops")
    taken: list[int] = []
    wait_for(lambda: taken.extend(ids(claim_jobs(ledger))) or len(taken) == 2, "both jobs are found")
    assert set(taken) == {old.job_id, newer}


def test_several_queues_keep_their_order_around_a_gap(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", queues=("a", "b")))
    crowd(ledger, queue="a")
    queues = ("b", "a")
    assert claim_jobs(ledger, queues=queues) == []
    assert [gap.queue for gap in gaps(ledger, queues=queues)] == ["a"]
    a1, b1, a2 = put(ledger, queue="a"), put(ledger, queue="b"), put(ledger, queue="a")
    b2, a3 = put(ledger, queue="b", priority=2), put(ledger, queue="a", priority=7)
    assert ids(claim_jobs(ledger, limit=3, queues=queues)) == [a3, b2, a1]
    assert ids(claim_jobs(ledger, limit=3, queues=queues)) == [b1, a2]


def test_a_busy_queue_does_not_hide_that_another_has_a_gap(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", queues=("a", "b")))
    crowd(ledger, queue="a")
    first = [put(ledger, queue="b") for _ in range(10)]
    assert ids(claim_jobs(ledger, limit=5, queues=("a", "b"))) == first[:5]
    late = put(ledger, queue="a")
    assert ids(claim_jobs(ledger, limit=5, queues=("a", "b"))) == first[5:]
    assert ids(claim_jobs(ledger, limit=5, queues=("a", "b"))) == [late]
    assert [gap.queue for gap in gaps(ledger, queues=("a", "b"))] == ["a"]


def test_what_another_claimer_has_locked_and_gives_back_is_no_gap(ledger: Ledger, w1: str, url: str) -> None:
    """As when a claimer dies before its commit. On SQLite nobody can look meanwhile."""
    if not url.startswith("postgresql"):
        return
    first = ledger.jobs.enqueue([new_job(queue="busy") for _ in range(6000)])[0].job_id
    lock = "select id from unstuck.jobs where ready and queue = 'busy' order by rank, id limit %s for update"
    for locked in (4000, 6000):
        with psycopg.connect(url) as claimer:
            claimer.execute(lock, (locked,))
            claim_jobs(ledger, limit=10, queues=("busy",))
            assert gaps(ledger, queues=("busy",)) == ()
            claimer.rollback()
        assert ids(claim_jobs(ledger, limit=1, queues=("busy",))) == [first]
        first += 1
