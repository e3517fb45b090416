"""Limits of queues, unique keys in other ways, expiry, and jobs that are kept for a time of their own."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    birth,
    claim_jobs,
    done,
    failure_retry,
    new_job,
    put,
    release,
    run,
    start,
    state_of,
    turn,
    wish,
)

from unstuck.domain.limits import QueueLimit
from unstuck.domain.states import JobState
from unstuck.errors import DuplicateJob
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Enqueued, JobExtras
from unstuck.ledger.contract.queues import QueueLimitRecord
from unstuck.ledger.contract.workers import Claimed


def ids(jobs: list[Claimed]) -> list[int]:
    return [job.job_id for job in jobs]


def limits(ledger: Ledger) -> QueueLimitRecord:
    [found] = ledger.queues.limits()
    return found


# Limits of queues ---------------------------------------------------------------------------


def test_so_many_of_a_queue_are_in_hand_as_may_be_across_workers(ledger: Ledger, w1: str) -> None:
    ledger.workers.register(birth("w2"))
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=3)})
    all_ids = [put(ledger) for _ in range(6)]
    other = put(ledger, queue="other")
    first = claim_jobs(ledger, limit=2)
    second = claim_jobs(ledger, "w2", limit=5, queues=("default", "other"))
    assert ids(first) == all_ids[:2]
    assert ids(second) == [all_ids[2], other]
    assert claim_jobs(ledger) == []
    assert (limits(ledger).held, limits(ledger).room) == (3, 0)
    start(ledger, first)
    turn(ledger, done=[done(first[0])])
    turn(ledger, release=[release(first[1])])
    assert ids(claim_jobs(ledger, "w2")) == [all_ids[1], all_ids[3]]


def test_a_queue_at_its_limit_is_polled_without_a_write(ledger: Ledger, w1: str) -> None:
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=1)})
    put(ledger), put(ledger)
    [job] = claim_jobs(ledger)
    answer = wish(ledger)
    assert (answer.claimed, answer.next_due_in_s) == ((), None)
    assert ledger.workers.held("w1")[0].job_id == job.job_id


def test_a_rate_gives_as_many_at_once_and_then_tells_when_the_next_comes(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    ledger.queues.declare_limits({"default": QueueLimit(rate=3, window_s=300.0)})
    all_ids = [put(ledger) for _ in range(6)]
    assert ids(claim_jobs(ledger)) == all_ids[:3]
    answer = wish(ledger)
    assert answer.claimed == ()
    assert answer.next_due_in_s == pytest.approx(100.0, abs=5.0)
    assert limits(ledger).in_s == pytest.approx(100.0, abs=5.0)
    meddler.age_tokens("default", 101.0)
    answer = wish(ledger)
    assert [job.job_id for job in answer.claimed] == [all_ids[3]]
    assert answer.next_due_in_s == pytest.approx(100.0, abs=5.0)
    # It never holds more than its size.
    meddler.age_tokens("default", 1e6)
    assert len(claim_jobs(ledger)) == 2


def test_a_rate_goes_on_evenly_when_the_clock_is_set_back_and_forward(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    ledger.queues.declare_limits({"default": QueueLimit(rate=3, window_s=300.0)})
    for _ in range(12):
        put(ledger)
    told: list[tuple[int, float | None]] = []
    # Seconds by which the clock moves before each look: an hour back or forward is a step, 101 s bring one token.
    for moved_s in (0.0, -3600.0, 101.0, -3600.0, 50.0, 51.0, 3600.0, 0.0):
        meddler.age_tokens("default", moved_s)
        answer = wish(ledger)
        waits_s = answer.next_due_in_s
        told.append((len(answer.claimed), None if waits_s is None else round(waits_s, -1)))
    # A step back counts as no time, and time counts again from there; a step forward fills the bucket at most.
    assert told == [(3, 100.0), (0, 100.0), (1, 100.0), (0, 100.0), (0, 50.0), (1, 100.0), (3, 100.0), (0, 100.0)]


def test_the_urgent_go_first_also_between_limited_and_other_queues(ledger: Ledger, w1: str) -> None:
    ledger.queues.declare_limits({"mail": QueueLimit(rate=10, window_s=1000.0)})
    low, high = put(ledger, queue="mail", priority=-5), put(ledger, queue="mail", priority=5)
    middle = put(ledger)
    chosen = claim_jobs(ledger, limit=2, queues=("default", "mail"))
    assert sorted(ids(chosen)) == sorted([high, middle])
    # What was looked at and not taken costs no token.
    assert limits(ledger).room == 9
    assert ids(claim_jobs(ledger, limit=2, queues=("default", "mail"))) == [low]


def test_an_operators_limit_stands_over_what_apps_declare(ledger: Ledger, w1: str) -> None:
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=1)})
    ledger.queues.limit("default", QueueLimit(concurrency=2), "ops")
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=1)})
    assert (limits(ledger).limit.concurrency, limits(ledger).limited_by) == (2, "ops")
    ledger.queues.limit("default", QueueLimit(), "ops")
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=1)})
    for _ in range(3):
        put(ledger)
    assert len(claim_jobs(ledger)) == 3
    ledger.queues.unlimit("default", "ops")
    assert ledger.queues.limits() == []
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=4)})
    assert limits(ledger).limit == QueueLimit(concurrency=4)
    assert [event.kind for event in ledger.events.list()].count("queue_limited") == 3


def test_many_workers_never_hold_more_than_the_limit(ledger: Ledger, open_again: OpenLedger) -> None:
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=2)})
    ledger.jobs.enqueue([new_job() for _ in range(60)])
    gate, at_work, most, ended = threading.Lock(), set(), [], []

    def work(number: int) -> None:
        mine, worker = open_again(), f"w{number}"
        mine.workers.register(birth(worker))
        while len(ended) < 60:
            for job in claim_jobs(mine, worker, limit=3):
                with gate:
                    at_work.add(job.job_id)
                    most.append(len(at_work))
                start(mine, [job], worker)
                with gate:
                    at_work.discard(job.job_id)
                turn(mine, worker, done=[done(job)])
                ended.append(job.job_id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 60
    assert max(most) == 2


# Unique keys -----------------------------------------------------------------------------------


def test_a_key_for_pending_jobs_is_free_when_its_job_is_claimed(ledger: Ledger, w1: str) -> None:
    once = {"unique_key": "k", "more": JobExtras(unique="pending")}
    first = put(ledger, **once)
    assert put(ledger, **once) == first
    [job] = claim_jobs(ledger)
    second = put(ledger, **once)
    assert second != first
    # What comes back to the queue finds its key taken, and goes without.
    turn(ledger, release=[release(job)])
    assert put(ledger, **once) == second
    jobs = run(ledger)
    assert ids(jobs) == [first, second]
    turn(ledger, done=[done(one) for one in jobs])
    assert put(ledger, **once) not in (first, second)


def test_a_key_for_a_period_outlives_its_job_and_ends_with_the_period(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    once = {"unique_key": "k", "more": JobExtras(unique_for_s=600.0)}
    first = put(ledger, **once)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    assert put(ledger, **once) == first
    meddler.age_keys(601.0)
    second = put(ledger, **once)
    assert second != first
    meddler.age_keys(601.0)
    assert put(ledger, **once) not in (first, second), "also while the job still waits"
    meddler.age_keys(601.0)
    ledger.maintenance.sweep_kept(10)
    assert meddler.count("unique_keys") == 0


def remove_by_retention(ledger: Ledger) -> int:
    return ledger.maintenance.sweep_old(0.0, 1e6, 1e6, 100).jobs


def remove_by_its_own_keep(ledger: Ledger) -> int:
    return ledger.maintenance.sweep_kept(100).jobs


def remove_by_hand(ledger: Ledger) -> int:
    return ledger.maintenance.prune(0.0)


@pytest.mark.parametrize("remove", [remove_by_retention, remove_by_its_own_keep, remove_by_hand])
def test_a_key_is_good_for_its_whole_period_although_its_job_was_removed(
    ledger: Ledger, w1: str, meddler: Backdoor, remove: Callable[[Ledger], int]
) -> None:
    keep_s = 1.0 if remove is remove_by_its_own_keep else None
    once = {"unique_key": "k", "more": JobExtras(unique_for_s=3600.0, retain_s=keep_s)}
    first = put(ledger, **once)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    meddler.age_job(first, 60.0)
    assert remove(ledger) == 1
    assert ledger.jobs.missing([first]) == {first}

    assert ledger.jobs.enqueue([new_job(**once)]) == [Enqueued(first, fresh=False)], "the removed job still has the key"
    with pytest.raises(DuplicateJob) as caught:
        put(ledger, unique_key="k", more=JobExtras(unique_for_s=3600.0, on_duplicate="refuse"))
    assert caught.value.job_id == first
    assert put(ledger, unique_key="k", more=JobExtras(unique_for_s=3600.0, on_duplicate="replace")) == first
    assert ledger.jobs.count() == {}

    meddler.age_keys(3601.0)
    ledger.maintenance.sweep_kept(100)
    assert meddler.count("unique_keys") == 0, "an expired key is removed"
    assert put(ledger, **once) != first


def test_an_operator_may_retry_a_job_whose_period_is_over(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    once = {"unique_key": "k", "more": JobExtras(unique_for_s=600.0)}
    first = put(ledger, **once)
    ledger.jobs.cancel([first], "ops")
    meddler.age_keys(601.0)
    put(ledger, **once)
    assert ledger.jobs.retry([first], "ops") == {first: "queued"}


@pytest.mark.parametrize("more", [{}, {"unique": "pending"}, {"unique_for_s": 600.0}])
def test_a_duplicate_is_refused_and_nothing_of_its_batch_is_stored(ledger: Ledger, w1: str, more: dict) -> None:  # type: ignore[type-arg]
    first = put(ledger, unique_key="k", more=JobExtras(**more))
    refusing = new_job(unique_key="k", more=JobExtras(on_duplicate="refuse", **more))
    with pytest.raises(DuplicateJob) as caught:
        ledger.jobs.enqueue([new_job(), refusing])
    assert caught.value.job_id == first
    assert ledger.jobs.count() == {"pending": 1}


@pytest.mark.parametrize("more", [{}, {"unique": "pending"}, {"unique_for_s": 600.0}])
def test_a_pending_duplicate_is_replaced_and_a_running_one_is_given_back(
    ledger: Ledger,
    w1: str,
    more: dict,  # type: ignore[type-arg]
) -> None:
    replacing = {"unique_key": "k", "more": JobExtras(on_duplicate="replace", concurrency_key="l", **more)}
    first = put(ledger, **replacing)
    second = put(ledger, **replacing)
    assert state_of(ledger, first) is JobState.CANCELLED
    [outcome] = ledger.jobs.outcomes([first])
    assert outcome.error is not None
    assert outcome.error.cause == f"replaced by job {second}"
    [job] = run(ledger)
    assert job.job_id == second
    answer = ledger.jobs.enqueue([new_job(**replacing)])[0]
    assert (answer.job_id == second, answer.fresh) == ((True, False) if "unique" not in more else (False, True))


def test_the_last_of_one_batch_replaces_those_before_it(ledger: Ledger, w1: str) -> None:
    replacing = {"unique_key": "k", "more": JobExtras(on_duplicate="replace")}
    answers = ledger.jobs.enqueue([new_job(payload=str(n).encode(), **replacing) for n in range(4)])
    [job] = claim_jobs(ledger)
    assert job.payload == b"3"
    assert job.job_id == answers[-1].job_id


@pytest.mark.parametrize("way", ["return", "replace", "refuse"])
@pytest.mark.parametrize("more", [{}, {"unique": "pending"}, {"unique_for_s": 600.0}])
def test_sixteen_threads_with_one_key_leave_one_job(
    ledger: Ledger,
    open_again: OpenLedger,
    way: str,
    more: dict,  # type: ignore[type-arg]
) -> None:
    ties = JobExtras(on_duplicate=None if way == "return" else way, **more)  # type: ignore[arg-type]
    ready, answers, refused = threading.Barrier(16), [], []

    def ask(mine: Ledger) -> None:
        ready.wait(30)
        try:
            answers.append(mine.jobs.enqueue([new_job(unique_key="k", more=ties)])[0])
        except DuplicateJob as error:
            refused.append(error.job_id)

    ledgers = [open_again() for _ in range(4)]
    threads = [threading.Thread(target=ask, args=(ledgers[n % 4],)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counts = ledger.jobs.count()
    assert counts["pending"] == 1
    fresh = [answer for answer in answers if answer.fresh]
    match way:
        case "return":
            assert (len(fresh), len({answer.job_id for answer in answers})) == (1, 1)
        case "refuse":
            assert (len(fresh), len(refused)) == (1, 15)
            assert set(refused) == {fresh[0].job_id}
        case "replace":
            assert len(fresh) == 16
            assert counts["cancelled"] == 15


# Expiry ----------------------------------------------------------------------------------------


def test_what_was_not_begun_in_time_is_cancelled_and_never_begun(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job_id, kept = put(ledger, more=JobExtras(expires_in_s=600.0)), put(ledger)
    assert ledger.maintenance.expire_due(10).count == 0
    assert ledger.maintenance.expire_due(10).next_in_s == pytest.approx(600.0, abs=10)
    meddler.age_expiry(job_id, 601.0)
    # Found by the claim, before the sweep came.
    assert ids(claim_jobs(ledger)) == [kept]
    [outcome] = ledger.jobs.outcomes([job_id])
    assert outcome.error is not None
    assert (outcome.state, outcome.error.code) == (JobState.CANCELLED, "EXPIRED")
    assert "600" in (outcome.error.cause or "")
    assert [event.kind for event in ledger.events.list(job_id=job_id)] == ["expired"]


def test_the_sweep_cancels_ready_delayed_and_blocked_jobs_and_frees_their_places(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    expiring = JobExtras(expires_in_s=600.0, concurrency_key="l")
    first, second = put(ledger, more=expiring), put(ledger, more=expiring)
    third = put(ledger, more=JobExtras(concurrency_key="l"))
    later = put(ledger, more=JobExtras(expires_in_s=600.0), delay_s=60.0)
    for job_id in (first, second, later):
        meddler.age_expiry(job_id, 1000.0)
    assert ledger.maintenance.expire_due(10).count == 3
    assert [state_of(ledger, one) for one in (first, second, later)] == [JobState.CANCELLED] * 3
    assert ids(claim_jobs(ledger)) == [third]


def test_what_has_begun_does_not_expire_while_it_waits_for_its_next_try(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    put(ledger, more=JobExtras(expires_in_s=600.0))
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job)])
    meddler.age_expiry(job.job_id, 1000.0)
    assert ledger.maintenance.expire_due(10).count == 0
    assert ids(claim_jobs(ledger)) == [job.job_id]


def test_a_released_job_still_expires(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    put(ledger, more=JobExtras(expires_in_s=600.0))
    [job] = claim_jobs(ledger)
    turn(ledger, release=[release(job)])
    meddler.age_expiry(job.job_id, 1000.0)
    assert ledger.maintenance.expire_due(10).count == 1


# Kept for a time of its own ----------------------------------------------------------------------


def test_a_job_is_kept_as_long_as_its_task_says(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    short, longer, plain = (
        put(ledger, more=JobExtras(retain_s=60.0)),
        put(ledger, more=JobExtras(retain_s=10_000.0)),
        put(ledger),
    )
    jobs = run(ledger)
    turn(ledger, done=[done(job) for job in jobs])
    assert ledger.maintenance.sweep_kept(10).total == 0
    for job_id in (short, longer, plain):
        meddler.age_job(job_id, 1000.0)
    assert ledger.maintenance.sweep_kept(10).jobs == 1
    assert ledger.jobs.missing([short, longer, plain]) == {short}
    # The sweep of all others, and an operator's, leave alone what is to be kept for longer.
    assert ledger.maintenance.sweep_old(500.0, 1e6, 1e6, 100).jobs == 1
    assert ledger.maintenance.prune(500.0) == 0
    assert ledger.jobs.missing([longer, plain]) == {plain}
    meddler.age_job(longer, 10_000.0)
    assert ledger.maintenance.prune(500.0) == 1


def test_what_is_known_of_a_job_beside_its_work(ledger: Ledger, w1: str) -> None:
    put(ledger, more=JobExtras(concurrency_key="l"))
    job_id = put(
        ledger,
        unique_key="k",
        more=JobExtras(concurrency_key="l", concurrency_limit=1, expires_in_s=60.0, retain_s=5.0, unique="pending"),
    )
    known = ledger.jobs.links(job_id)
    assert known is not None
    assert (known.concurrency_key, known.concurrency_limit, known.blocked, known.retain_s, known.unique_for) == (
        "l",
        1,
        True,
        5.0,
        "pending",
    )
    assert known.expires_at == pytest.approx(time.time() + 60.0, abs=10.0)
    assert ledger.jobs.links(999) is None
