"""Lines: so many jobs with one concurrency key are at work as may be, whoever dies, and no place stays free."""

import threading

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import (
    birth,
    claim,
    crash,
    crash_retry,
    done,
    failure_retry,
    new_job,
    put,
    release,
    run,
    start,
    state_of,
    turn,
    verdict,
)
from tests.contract.meddling import Meddler

from unstuck.domain.endings import Ending
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, GuardDead, GuardNone, LineRecord, Ties

KEY = "customer:7"


def in_line(key: str = KEY, limit: int | None = None, **more: object) -> Ties:
    return Ties(line=key, line_limit=limit, **more)  # type: ignore[arg-type]


def line(ledger: Ledger, key: str = KEY) -> LineRecord:
    [found] = ledger.lines(key)
    return found


def ids(jobs: list[Claimed]) -> list[int]:
    return [job.job_id for job in jobs]


def test_one_at_a_time_in_the_order_of_the_queue(ledger: Ledger, w1: str) -> None:
    first, second, urgent = (
        put(ledger, more=in_line()),
        put(ledger, more=in_line()),
        put(ledger, more=in_line(), priority=5),
    )
    free = put(ledger)
    jobs = run(ledger)
    assert ids(jobs) == [first, free]
    assert state_of(ledger, second) is JobState.PENDING
    assert [one.job_id for one in line(ledger).holders] == [first]
    assert line(ledger).blocked == 2
    turn(ledger, done=[done(jobs[0])])
    [job] = run(ledger)
    assert job.job_id == urgent
    turn(ledger, endings=[crash(job)])
    assert ids(run(ledger)) == [second]


def test_as_many_as_the_limit_says_and_the_last_word_wins(ledger: Ledger, w1: str) -> None:
    all_ids = [put(ledger, more=in_line(limit=2)) for _ in range(5)]
    assert ids(claim(ledger)) == all_ids[:2]
    sixth = put(ledger, more=in_line(limit=4))
    assert ids(claim(ledger)) == all_ids[2:4]
    put(ledger, more=in_line(limit=1))
    assert claim(ledger) == []
    assert line(ledger).places == 1
    assert state_of(ledger, sixth) is JobState.PENDING


def test_an_operators_limit_stands_until_it_is_taken_back(ledger: Ledger, w1: str) -> None:
    all_ids = [put(ledger, more=in_line(limit=1)) for _ in range(4)]
    ledger.limit_line(KEY, 3, "ops")
    assert ids(claim(ledger)) == all_ids[:3]
    put(ledger, more=in_line(limit=5))
    assert claim(ledger) == []
    assert line(ledger).pinned_by == "ops"
    ledger.limit_line(KEY, None, "ops")
    put(ledger, more=in_line(limit=5))
    assert len(claim(ledger)) == 2
    assert [event.kind for event in ledger.events()].count("line_limited") == 2


def test_a_released_job_keeps_its_place_and_a_retry_lines_up_again(ledger: Ledger, w1: str) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    [job] = claim(ledger)
    turn(ledger, release=[release(job)])
    [job] = run(ledger)
    assert job.job_id == first
    # Later by an hour: the other one goes first.
    turn(ledger, endings=[failure_retry(job, delay_s=3600.0)])
    [job] = run(ledger)
    assert job.job_id == second
    turn(ledger, endings=[crash_retry(job)])
    assert ids(run(ledger)) == [second]


def test_a_dead_workers_place_is_free_with_the_verdict_on_its_job(ledger: Ledger, w1: str) -> None:
    put(ledger, more=in_line())
    second = put(ledger, more=in_line())
    ledger.register(birth("w2"))
    [job] = run(ledger)
    assert claim(ledger, "w2") == []
    assert ledger.condemn("w1", verdict(), GuardNone())
    assert ledger.settle("w1", [crash(job)], [], GuardDead())
    assert ids(claim(ledger, "w2")) == [second]


def test_a_suspended_job_gives_its_place_back_and_lines_up_when_it_wakes(ledger: Ledger, w1: str) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    [job] = run(ledger)
    turn(ledger, endings=[Ending(job.job_id, job.token, JobState.WAITING, AttemptState.SUSPENDED, delay_s=0.01)])
    [other] = run(ledger)
    assert other.job_id == second
    while not ledger.promote_due(10).count:
        pass
    assert state_of(ledger, first) is JobState.PENDING
    assert claim(ledger) == []
    turn(ledger, done=[done(other)])
    assert ids(claim(ledger)) == [first]


def test_cancelling_who_was_let_in_lets_the_next_in(ledger: Ledger, w1: str) -> None:
    first, second, third, fourth = (put(ledger, more=in_line()) for _ in range(4))
    ledger.cancel([first, third], "ops")
    [job] = claim(ledger)
    assert job.job_id == second
    ledger.cancel([second], "ops")
    assert ids(claim(ledger)) == [fourth]


def test_purging_leaves_an_empty_line_which_is_closed(ledger: Ledger, w1: str) -> None:
    for _ in range(3):
        put(ledger, more=in_line(limit=2))
    assert ledger.purge("default", "ops") == 3
    assert line(ledger).holders == ()
    assert ledger.tend_lines("", 100).removed == 1
    assert ledger.lines() == []
    assert ids(claim(ledger)) == []
    # Retried by an operator, it brings its limit along.
    ledger.retry([1, 2, 3], "ops")
    assert len(claim(ledger)) == 2
    assert line(ledger).places == 2


def test_a_delayed_job_stands_in_line_when_it_is_due(ledger: Ledger, w1: str) -> None:
    later = put(ledger, more=in_line(), delay_s=0.05)
    now = put(ledger, more=in_line())
    [job] = run(ledger)
    assert job.job_id == now
    while not ledger.promote_due(10).count:
        pass
    assert claim(ledger) == []
    turn(ledger, done=[done(job)])
    assert ids(claim(ledger)) == [later]


def test_who_waits_at_a_free_place_is_found_and_said(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    meddler.untie(first)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    assert claim(ledger) == []
    tended = ledger.tend_lines("", 100)
    assert (tended.repaired, tended.queues) == (1, frozenset({"default"}))
    assert ids(claim(ledger)) == [second]
    assert [event.kind for event in ledger.events()][-1] == "line_repaired"


def test_blocked_jobs_without_a_line_are_found(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    ledger.cancel([first], "ops")
    meddler.forget_line(second)
    assert ledger.tend_lines("", 100).repaired == 1
    assert ids(claim(ledger)) == [second]


def test_many_lines_are_tended_stretch_by_stretch(ledger: Ledger, w1: str) -> None:
    ledger.enqueue([new_job(more=in_line(f"k{n:02}")) for n in range(10)])
    assert ledger.purge("default", "ops") == 10
    after, removed = "", 0
    for _ in range(10):
        tended = ledger.tend_lines(after, 4)
        removed += tended.removed
        if tended.next_after is None:
            break
        after = tended.next_after
    assert removed == 10


@pytest.mark.parametrize("limit", [1, 3])
def test_never_more_than_may_be_with_many_hands(ledger: Ledger, open_again: OpenLedger, limit: int) -> None:
    """Eight threads claim, finish, give back and enqueue at once; each looks at every claim how many are at work."""
    keys = ["a", "b", "c"]
    at_work: dict[str, set[int]] = {key: set() for key in keys}
    gate, wrong, ended = threading.Lock(), [], []
    total = 8 * 12

    def work(number: int) -> None:
        mine = open_again()
        worker = f"w{number}"
        mine.register(birth(worker))
        mine.enqueue([new_job(payload=key.encode(), more=in_line(key, limit)) for key in keys * 4])
        step = 0
        while len(ended) < total:
            step += 1
            for job in claim(mine, worker, limit=2):
                key = job.payload.decode()
                with gate:
                    at_work[key].add(job.job_id)
                    if len(at_work[key]) > limit:
                        wrong.append((key, set(at_work[key])))
                start(mine, [job], worker)
                with gate:
                    at_work[key].discard(job.job_id)
                if (job.job_id + step) % 5 == 0:
                    turn(mine, worker, endings=[crash_retry(job)])
                else:
                    turn(mine, worker, done=[done(job)])
                    ended.append(job.job_id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(ended) == total
    assert ledger.tend_lines("", 100).repaired == 0
