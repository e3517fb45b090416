"""Lines: so many jobs with one concurrency key are at work as may be, whoever dies, and no place stays free."""

import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    birth,
    claim_jobs,
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

from unstuck.domain.endings import Ending
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.queues import KeyRecord
from unstuck.ledger.contract.recovery import GuardDead, GuardNone
from unstuck.ledger.contract.workers import Claimed

KEY = "customer:7"


def in_line(key: str = KEY, limit: int | None = None, **more: object) -> JobExtras:
    return JobExtras(concurrency_key=key, concurrency_limit=limit, **more)  # type: ignore[arg-type]


def line(ledger: Ledger, key: str = KEY) -> KeyRecord:
    [found] = ledger.queues.concurrency_keys(key)
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
    assert ids(claim_jobs(ledger)) == all_ids[:2]
    sixth = put(ledger, more=in_line(limit=4))
    assert ids(claim_jobs(ledger)) == all_ids[2:4]
    put(ledger, more=in_line(limit=1))
    assert claim_jobs(ledger) == []
    assert line(ledger).places == 1
    assert state_of(ledger, sixth) is JobState.PENDING


def test_an_operators_limit_stands_until_it_is_taken_back(ledger: Ledger, w1: str) -> None:
    all_ids = [put(ledger, more=in_line(limit=1)) for _ in range(4)]
    ledger.queues.limit_key(KEY, 3, "ops")
    assert ids(claim_jobs(ledger)) == all_ids[:3]
    put(ledger, more=in_line(limit=5))
    assert claim_jobs(ledger) == []
    assert line(ledger).pinned_by == "ops"
    ledger.queues.limit_key(KEY, None, "ops")
    put(ledger, more=in_line(limit=5))
    assert len(claim_jobs(ledger)) == 2
    assert [event.kind for event in ledger.events.list()].count("line_limited") == 2


def test_a_released_job_keeps_its_place_and_a_retry_lines_up_again(ledger: Ledger, w1: str) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    [job] = claim_jobs(ledger)
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
    ledger.workers.register(birth("w2"))
    [job] = run(ledger)
    assert claim_jobs(ledger, "w2") == []
    assert ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert ledger.recovery.settle("w1", [crash(job)], [], GuardDead())
    assert ids(claim_jobs(ledger, "w2")) == [second]


def test_a_suspended_job_gives_its_place_back_and_lines_up_when_it_wakes(ledger: Ledger, w1: str) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    [job] = run(ledger)
    turn(ledger, endings=[Ending(job.job_id, job.token, JobState.WAITING, AttemptState.SUSPENDED, delay_s=0.01)])
    [other] = run(ledger)
    assert other.job_id == second
    while not ledger.maintenance.promote_due(10).count:
        pass
    assert state_of(ledger, first) is JobState.PENDING
    assert claim_jobs(ledger) == []
    turn(ledger, done=[done(other)])
    assert ids(claim_jobs(ledger)) == [first]


def test_cancelling_who_was_let_in_lets_the_next_in(ledger: Ledger, w1: str) -> None:
    first, second, third, fourth = (put(ledger, more=in_line()) for _ in range(4))
    ledger.jobs.cancel([first, third], "ops")
    [job] = claim_jobs(ledger)
    assert job.job_id == second
    ledger.jobs.cancel([second], "ops")
    assert ids(claim_jobs(ledger)) == [fourth]


def test_purging_leaves_an_empty_line_which_is_closed(ledger: Ledger, w1: str) -> None:
    for _ in range(3):
        put(ledger, more=in_line(limit=2))
    assert ledger.queues.purge("default", "ops") == 3
    assert line(ledger).holders == ()
    assert ledger.maintenance.check_keys("", 100).removed == 1
    assert ledger.queues.concurrency_keys() == []
    assert ids(claim_jobs(ledger)) == []
    # Retried by an operator, it brings its limit along.
    ledger.jobs.retry([1, 2, 3], "ops")
    assert len(claim_jobs(ledger)) == 2
    assert line(ledger).places == 2


def test_a_delayed_job_stands_in_line_when_it_is_due(ledger: Ledger, w1: str) -> None:
    later = put(ledger, more=in_line(), delay_s=0.05)
    now = put(ledger, more=in_line())
    [job] = run(ledger)
    assert job.job_id == now
    while not ledger.maintenance.promote_due(10).count:
        pass
    assert claim_jobs(ledger) == []
    turn(ledger, done=[done(job)])
    assert ids(claim_jobs(ledger)) == [later]


def test_who_waits_at_a_free_place_is_found_and_said(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    meddler.untie(first)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    assert claim_jobs(ledger) == []
    tended = ledger.maintenance.check_keys("", 100)
    assert (tended.repaired, tended.queues) == (1, frozenset({"default"}))
    assert ids(claim_jobs(ledger)) == [second]
    assert [event.kind for event in ledger.events.list()][-1] == "line_repaired"


def test_blocked_jobs_without_a_line_are_found(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    first, second = put(ledger, more=in_line()), put(ledger, more=in_line())
    ledger.jobs.cancel([first], "ops")
    meddler.forget_line(second)
    assert ledger.maintenance.check_keys("", 100).repaired == 1
    assert ids(claim_jobs(ledger)) == [second]


def test_many_lines_are_tended_stretch_by_stretch(ledger: Ledger, w1: str) -> None:
    ledger.jobs.enqueue([new_job(more=in_line(f"k{n:02}")) for n in range(10)])
    assert ledger.queues.purge("default", "ops") == 10
    after, removed = "", 0
    for _ in range(10):
        tended = ledger.maintenance.check_keys(after, 4)
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
        mine.workers.register(birth(worker))
        mine.jobs.enqueue([new_job(payload=key.encode(), more=in_line(key, limit)) for key in keys * 4])
        step = 0
        while len(ended) < total:
            step += 1
            for job in claim_jobs(mine, worker, limit=2):
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
    assert ledger.maintenance.check_keys("", 100).repaired == 0


KEYS = ("a", "b")
_runs = itertools.count()


@dataclass
class ModelJob:
    key: str
    rank: int
    limit: int
    state: str = "blocked"


@dataclass
class Model:
    """What should be so: jobs by id, and how many places each line has."""

    jobs: dict[int, ModelJob] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def of(self, key: str, *states: str) -> list[int]:
        found = [number for number, job in self.jobs.items() if job.key == key and job.state in states]
        return sorted(found, key=lambda number: (self.jobs[number].rank, number))

    def admit(self, key: str) -> None:
        blocked = self.of(key, "blocked")
        if key not in self.places:
            self.places[key] = self.jobs[blocked[0]].limit if blocked else 1
        free = self.places[key] - len(self.of(key, "ready", "claimed", "running"))
        for number in blocked[: max(0, free)]:
            self.jobs[number].state = "ready"

    def move(self, number: int, state: str) -> None:
        job = self.jobs[number]
        job.state = state
        self.admit(job.key)

    def tend(self) -> None:
        for key in [key for key in self.places if not self.of(key, "blocked", "ready", "claimed", "running")]:
            del self.places[key]


ACTS = st.one_of(
    st.tuples(
        st.just("enqueue"), st.sampled_from(KEYS), st.integers(-1, 1), st.integers(1, 3), st.sampled_from([0.0, 3600.0])
    ),
    st.tuples(st.just("claim"), st.integers(1, 3)),
    st.tuples(
        st.sampled_from(
            ["start", "done", "fail", "crash", "retry_now", "retry_later", "release", "die", "cancel", "revive", "due"]
        ),
        st.integers(0, 50),
    ),
    st.tuples(st.just("tend")),
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(acts=st.lists(ACTS, min_size=10, max_size=40))
def test_places_are_held_as_the_model_says(ledger: Ledger, w1: str, meddler: Backdoor, acts: list[tuple]) -> None:  # type: ignore[type-arg]
    model, run = Model(), f"{next(_runs)}:"
    hands: dict[int, Claimed] = {}
    for act in acts:
        _do(ledger, meddler, model, hands, run, act)
        for key in KEYS:
            found = ledger.queues.concurrency_keys(run + key)
            holders = [one.job_id for line in found for one in line.holders]
            assert sorted(holders) == sorted(model.of(key, "ready", "claimed", "running")), act
            assert [(line.places, line.blocked) for line in found] == (
                [(model.places[key], len(model.of(key, "blocked")))] if key in model.places else []
            ), act
    assert ledger.maintenance.check_keys("", 1_000).repaired == 0
    # Leave nothing behind for the next run.
    turn(ledger, endings=[crash(job) for number, job in hands.items() if model.jobs[number].state == "running"])
    ledger.jobs.cancel(list(model.jobs), "test")
    ledger.maintenance.check_keys("", 1_000)


def _do(ledger: Ledger, meddler: Backdoor, model: Model, hands: dict[int, Claimed], run: str, act: tuple) -> None:  # type: ignore[type-arg]
    match act:
        case ("enqueue", key, priority, limit, delay_s):
            number = put(
                ledger,
                priority=priority,
                delay_s=delay_s,
                more=JobExtras(concurrency_key=run + key, concurrency_limit=limit),
            )
            model.jobs[number] = ModelJob(key, -priority, limit, "waiting" if delay_s else "blocked")
            model.places[key] = limit
            model.admit(key)
        case ("claim", count):
            ready = sorted((job.rank, number) for number, job in model.jobs.items() if job.state == "ready")[:count]
            taken = claim_jobs(ledger, limit=count)
            assert sorted(job.job_id for job in taken) == sorted(number for _, number in ready)
            for job in taken:
                hands[job.job_id] = job
                model.jobs[job.job_id].state = "claimed"
        case ("tend",):
            assert ledger.maintenance.check_keys("", 1_000).repaired == 0
            model.tend()
        case (verb, at):
            _do_to_one(ledger, meddler, model, hands, verb, at)


def _do_to_one(ledger: Ledger, meddler: Backdoor, model: Model, hands: dict[int, Claimed], verb: str, at: int) -> None:
    may = {
        "start": ("claimed",),
        "release": ("claimed", "running"),
        "cancel": ("blocked", "ready", "claimed", "waiting"),
        "revive": ("failed", "cancelled"),
        "due": ("waiting",),
    }.get(verb, ("running",))
    able = sorted(number for number, job in model.jobs.items() if job.state in may)
    if not able:
        return
    number = able[at % len(able)]
    job = hands.get(number)
    match verb:
        case "start":
            assert job is not None
            start(ledger, [job])
            model.jobs[number].state = "running"
        case "done":
            assert job is not None
            turn(ledger, done=[done(job)])
            model.move(number, "succeeded")
        case "fail" | "crash":
            assert job is not None
            turn(ledger, endings=[crash(job)])
            model.move(number, "failed")
        case "retry_now":
            assert job is not None
            turn(ledger, endings=[crash_retry(job)])
            model.move(number, "blocked")
        case "retry_later":
            assert job is not None
            turn(ledger, endings=[failure_retry(job, delay_s=3600.0)])
            model.move(number, "waiting")
        case "release":
            assert job is not None
            turn(ledger, release=[release(job)])
            model.jobs[number].state = "ready"
        case "die":
            assert job is not None
            assert ledger.recovery.settle("w1", [crash_retry(job)], [], GuardNone())
            model.move(number, "blocked")
        case "cancel":
            assert ledger.jobs.cancel([number], "ops") == {number: "cancelled"}
            model.move(number, "cancelled")
        case "revive":
            assert ledger.jobs.retry([number], "ops") == {number: "queued"}
            model.move(number, "blocked")
        case "due":
            meddler.age_job(number, 7200.0)
            assert ledger.maintenance.promote_due(100).count == 1
            model.move(number, "blocked")
