"""Lines against a pure model: whatever is done to jobs, those have places who should, and the counts never drift."""

import itertools
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.hands import claim, crash, crash_retry, done, failure_retry, put, release, start, turn
from tests.contract.meddling import Meddler

from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, GuardNone, Ties

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
def test_places_are_held_as_the_model_says(ledger: Ledger, w1: str, meddler: Meddler, acts: list[tuple]) -> None:  # type: ignore[type-arg]
    model, run = Model(), f"{next(_runs)}:"
    hands: dict[int, Claimed] = {}
    for act in acts:
        _do(ledger, meddler, model, hands, run, act)
        for key in KEYS:
            found = ledger.lines(run + key)
            holders = [one.job_id for line in found for one in line.holders]
            assert sorted(holders) == sorted(model.of(key, "ready", "claimed", "running")), act
            assert [(line.places, line.blocked) for line in found] == (
                [(model.places[key], len(model.of(key, "blocked")))] if key in model.places else []
            ), act
    assert ledger.tend_lines("", 1_000).repaired == 0
    # Leave nothing behind for the next run.
    turn(ledger, endings=[crash(job) for number, job in hands.items() if model.jobs[number].state == "running"])
    ledger.cancel(list(model.jobs), "test")
    ledger.tend_lines("", 1_000)


def _do(ledger: Ledger, meddler: Meddler, model: Model, hands: dict[int, Claimed], run: str, act: tuple) -> None:  # type: ignore[type-arg]
    match act:
        case ("enqueue", key, priority, limit, delay_s):
            number = put(ledger, priority=priority, delay_s=delay_s, more=Ties(line=run + key, line_limit=limit))
            model.jobs[number] = ModelJob(key, -priority, limit, "waiting" if delay_s else "blocked")
            model.places[key] = limit
            model.admit(key)
        case ("claim", count):
            ready = sorted((job.rank, number) for number, job in model.jobs.items() if job.state == "ready")[:count]
            taken = claim(ledger, limit=count)
            assert sorted(job.job_id for job in taken) == sorted(number for _, number in ready)
            for job in taken:
                hands[job.job_id] = job
                model.jobs[job.job_id].state = "claimed"
        case ("tend",):
            assert ledger.tend_lines("", 1_000).repaired == 0
            model.tend()
        case (verb, at):
            _do_to_one(ledger, meddler, model, hands, verb, at)


def _do_to_one(ledger: Ledger, meddler: Meddler, model: Model, hands: dict[int, Claimed], verb: str, at: int) -> None:
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
            assert ledger.settle("w1", [crash_retry(job)], [], GuardNone())
            model.move(number, "blocked")
        case "cancel":
            assert ledger.cancel([number], "ops") == {number: "cancelled"}
            model.move(number, "cancelled")
        case "revive":
            assert ledger.retry([number], "ops") == {number: "queued"}
            model.move(number, "blocked")
        case "due":
            meddler.age_job(number, 7200.0)
            assert ledger.promote_due(100).count == 1
            model.move(number, "blocked")
