"""A job of several steps loses its process or its worker: what was done and written down is not done again."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.crash.apps import steps
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, copy_tasks, wait_for

from unstuck import App, SignalRefused, TaskFailed
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.ledger.contract.jobs import JobFilter

TASKS = "tests.crash.apps.steps:app"
PATIENCE_S = 60
FIVE = [10, 20, 30, 40, 50]


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    fleet = make_fleet(heartbeat_interval="0.2s")
    copy_tasks(steps.app, fleet.app)
    return fleet


def start(fleet: Fleet, *arguments: str) -> Any:
    return fleet.start("--concurrency", "4", *arguments, target=TASKS)


def folder(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


def effects(place: str) -> Counter[str]:
    path = Path(place, "effects")
    return Counter(path.read_text().split("\n")[:-1] if path.exists() else ())


@pytest.mark.both_databases
def test_killed_after_each_step_in_turn_every_effect_happens_once(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    places = [folder(tmp_path, f"a{number}") for number in range(1, 6)]
    jobs = [fleet.task("five_steps").enqueue(place, number) for number, place in enumerate(places, 1)]
    for job, place in zip(jobs, places, strict=True):
        assert job.result(timeout=PATIENCE_S) == FIVE
        assert effects(place) == {f"s{number}": 1 for number in range(1, 6)}
        assert [one.state for one in fleet.ledger.jobs.attempts(job.id)] == [
            AttemptState.CRASHED,
            AttemptState.SUCCEEDED,
        ]
        journal = fleet.ledger.jobs.journal(job.id)
        assert [(one.name, one.value) for one in journal] == [(f"s{n}", b"%d" % (10 * n)) for n in range(1, 6)]


def test_killed_between_effect_and_record_that_one_effect_happens_twice(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    places = [folder(tmp_path, f"a{number}") for number in (1, 3, 5)]
    jobs = [fleet.task("five_steps").enqueue(place, die_in=f"s{place[-1]}") for place in places]
    for job, place in zip(jobs, places, strict=True):
        assert job.result(timeout=PATIENCE_S) == FIVE
        assert effects(place) == {f"s{n}": 1 + (str(n) == place[-1]) for n in range(1, 6)}


def test_async_steps_come_back_too_also_those_that_ran_together(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    place = folder(tmp_path, "a")
    assert fleet.task("five_steps_async").enqueue(place, 4).result(timeout=PATIENCE_S) == FIVE
    assert effects(place) == {f"s{number}": 1 for number in range(1, 6)}


@pytest.mark.both_databases
def test_the_whole_worker_is_killed_between_two_steps(fleet: Fleet, tmp_path: Path) -> None:
    worker = start(fleet)
    place = folder(tmp_path, "a")
    job = fleet.task("held_up").enqueue(place)
    wait_for(lambda: Path(place, "between").exists(), "the first step to be done")
    worker.kill_family()
    Path(place, "go").touch()
    start(fleet)
    assert job.result(timeout=PATIENCE_S) == [1, 2]
    assert effects(place) == {"first": 1, "second": 1}


@pytest.mark.parametrize(
    ("point", "times"),
    [("turn.answer_lost=raise:3", 1), ("turn.after_commit=kill:3", 1), ("turn.before_commit=kill:3", 2)],
    ids=["answer lost", "killed after the commit", "killed before the commit"],
)
def test_at_the_worst_moments_of_the_worker_no_step_is_lost_or_doubled(
    fleet: Fleet, tmp_path: Path, point: str, times: int
) -> None:
    place = folder(tmp_path, "a")
    job = fleet.task("five_steps").enqueue(place)
    # The first turn claims, the second writes the first step, the third the second.
    worker = fleet.start("--concurrency", "1", target=TASKS, wait=False, UNSTUCK_FAILPOINTS=point)
    if "kill" in point:
        worker.process.wait(PATIENCE_S)
        start(fleet)
    assert job.result(timeout=PATIENCE_S) == FIVE
    assert effects(place) == {"s1": 1, "s2": times, "s3": 1, "s4": 1, "s5": 1}
    assert [one.name for one in fleet.ledger.jobs.journal(job.id)] == ["s1", "s2", "s3", "s4", "s5"]


@pytest.mark.both_databases
def test_a_sleep_gives_the_slot_back_and_survives_the_end_of_all_workers(fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start("--concurrency", "1", target=TASKS)
    place = folder(tmp_path, "a")
    job = fleet.task("naps").enqueue(place, 4)
    fleet.wait_state(job, JobState.WAITING)
    # Its slot is free meanwhile.
    assert fleet.task("follows").enqueue("x").result(timeout=PATIENCE_S) == "x"
    worker.kill_family()
    start(fleet)
    assert job.result(timeout=PATIENCE_S) == ["begun", 1, 2, 2]
    assert effects(place) == {"begin": 1, "finally": 2, "charge 1": 1, "charge 2": 1}
    record = job.record()
    assert (record.failures, record.crash_count, record.attempt) == (0, 0, 2)
    assert [one.kind for one in fleet.ledger.jobs.journal(job.id)] == ["step", "sleep", "step", "step"]
    assert record.finished_at is not None
    assert record.finished_at >= record.enqueued_at + 4


@pytest.mark.both_databases
def test_signals_before_while_and_after_waiting(fleet: Fleet, tmp_path: Path) -> None:
    place = folder(tmp_path, "a")
    job = fleet.task("asks").enqueue(place, 3)
    assert job.signal("answer", {"n": 1}) == "kept"
    assert job.signal("unrelated") == "kept"
    start(fleet)
    fleet.wait_state(job, JobState.WAITING)
    assert job.record().awaits_signal == "answer"
    assert job.signal("answer", [2]) == "woken"
    wait_for(lambda: len(fleet.ledger.jobs.journal(job.id)) == 3, "the third wait to begin")
    fleet.wait_state(job, JobState.WAITING)
    assert job.signal("answer", None) == "woken"
    assert job.result(timeout=PATIENCE_S) == [{"n": 1}, [2], None]
    assert [one.taken_seq for one in fleet.ledger.jobs.signals(job.id)] == [1, None, 2, 3]
    with pytest.raises(SignalRefused, match="has ended"):
        job.signal("answer", 4)


def test_async_jobs_sleep_and_wait_too(fleet: Fleet) -> None:
    start(fleet)
    job = fleet.task("asks_async").enqueue()
    job.signal("answer", 1)
    wait_for(lambda: len(fleet.ledger.jobs.journal(job.id)) == 3, "the second wait to begin")
    job.signal("answer", 2)
    assert job.result(timeout=PATIENCE_S) == [1, 2]


def test_a_signal_that_never_comes(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    job = fleet.task("asks").enqueue(folder(tmp_path, "a"), 1, 0.3)
    assert job.result(timeout=PATIENCE_S) == ["SignalTimeout"]


def test_a_loop_goes_on_from_its_last_checkpoint(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    place = folder(tmp_path, "a")
    assert fleet.task("counts").enqueue(place, 300, 200).result(timeout=PATIENCE_S) == 201
    assert effects(place) == {str(number): 1 for number in range(300)}


def test_what_follows_is_enqueued_with_success_and_only_then(fleet: Fleet) -> None:
    start(fleet)
    with pytest.raises(TaskFailed):
        fleet.task("leads").enqueue(False).result(timeout=PATIENCE_S)
    job = fleet.task("leads").enqueue(True)
    assert job.result(timeout=PATIENCE_S) == "led"
    later, by_name, by_task = fleet.ledger.jobs.list(JobFilter(task="follows"))
    assert later.priority == 5
    assert later.run_at > later.enqueued_at + 3000
    assert {one.enqueued_by for one in (later, by_name, by_task)} == {f"job {job.id}"}
    assert fleet.app.job(by_task.id).result(timeout=PATIENCE_S) == "by task"
    assert fleet.app.job(by_name.id).result(timeout=PATIENCE_S) == "by name"


def test_a_node_of_a_workflow_may_sleep_and_wait(fleet: Fleet) -> None:
    start(fleet)
    flow = fleet.app.workflow("slow")
    flow.add(fleet.task("follows"), flow.add(fleet.task("asks_async")))
    run = flow.start()
    (node,) = fleet.ledger.jobs.list(JobFilter(task="asks_async"))
    for value in (1, 2):
        fleet.app.job(node.id).signal("answer", value)
    assert run.result(timeout=PATIENCE_S) == [1, 2]


CHANGED = {
    "renamed": (["a", "x", "c"], "step 'x'"),
    "removed": (["a", "c"], "step 'c'"),
    "reordered": (["b", "a", "c"], "step 'b'"),
    "shortened": (["a", "b"], "ends before it"),
}


def test_steps_that_changed_meanwhile_are_reported_and_not_mixed_up(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet)
    for name, (after, _) in CHANGED.items():
        fleet.task("changing").options(unique_key=name).enqueue(folder(tmp_path, name), ["a", "b", "c"], after)
    for record in fleet.ledger.jobs.list(JobFilter(task="changing")):
        name = str(record.unique_key)
        with pytest.raises(TaskFailed, match=CHANGED[name][1]) as caught:
            fleet.app.job(record.id).result(timeout=PATIENCE_S)
        assert caught.value.remote_type.endswith("StepMismatch")
        assert effects(str(tmp_path / name)) == {"a": 1, "b": 1, "c": 1}


TARGET = "tests.crash.apps.hooks:app"
FAST = {"heartbeat_interval": "300ms"}


class Hooked:
    def __init__(self, fleet: Fleet, notes: Path) -> None:
        self.fleet = fleet
        self.notes = notes
        self.app = App(fleet.url, queues=["hooks", "work"])
        copy_tasks(importlib.import_module("tests.crash.apps.hooks").app, self.app)

    def start(self, *arguments: str, **more: Any) -> Any:
        return self.fleet.start(*arguments, target=TARGET, NOTES_TO=str(self.notes), **more)

    def said(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def settle(self, count: int) -> "Counter[str]":
        """Wait until so many hooks have been enqueued and all has ended; give what they noted, without the ids."""
        ledger = self.fleet.ledger
        wait_for(lambda: len(ledger.jobs.list(JobFilter(queue="hooks"))) >= count, f"{count} hooks")
        wait_for(lambda: all(job.state in FINAL_STATES for job in ledger.jobs.list(JobFilter())), "every job to end")
        assert len(ledger.jobs.list(JobFilter(queue="hooks"))) == count
        return Counter(" ".join(line.split()[::2]) for line in self.said() if line != "begun")


@pytest.fixture
def hooked(make_fleet: MakeFleet, tmp_path: Path) -> Any:
    made = Hooked(make_fleet(**FAST), tmp_path / "notes")
    yield made
    made.app.close()


def test_each_end_is_followed_once(hooked: Hooked) -> None:
    hooked.start("--concurrency", "2")
    hooked.app.task_by_name("nap").enqueue(0.0)
    hooked.app.task_by_name("fail").enqueue()
    hooked.app.task_by_name("poison").enqueue()
    lines = hooked.settle(1 + 2 + 4)
    assert {line.split()[0] for line in lines} == {"success", "failure", "retry", "crash"}
    assert sum(lines.values()) == 7


def test_the_reaper_ends_the_job_of_a_killed_worker_and_the_hook_fires_once(hooked: Hooked) -> None:
    victim = hooked.start("--queues", "work", "--concurrency", "1")
    hooked.app.task_by_name("nap").enqueue(600.0)
    wait_for(lambda: "begun" in hooked.said(), "user code to run")
    hooked.start("--queues", "hooks", "--concurrency", "1")
    victim.kill_family()
    hooked.settle(2)
    assert sorted(line.split()[0] for line in hooked.said()[1:]) == ["crash", "failure"]
    assert all(line.endswith("failed WORKER_CRASHED") for line in hooked.said()[1:])


@pytest.mark.both_databases
@pytest.mark.parametrize("point", ["turn.before_commit=kill:2", "turn.after_commit=kill:2"])
def test_a_worker_is_killed_around_the_turn_that_ends_it(hooked: Hooked, point: str) -> None:
    hooked.app.task_by_name("nap").enqueue(0.0)
    victim = hooked.start("--queues", "work", "--concurrency", "1", wait=False, UNSTUCK_FAILPOINTS=point)
    wait_for(lambda: victim.process.poll() is not None or len(hooked.said()) > 1, "the kill")
    hooked.start("--queues", "hooks,work", "--concurrency", "1")
    ledger = hooked.fleet.ledger
    wait_for(
        lambda: [job for job in ledger.jobs.list(JobFilter(queue="hooks")) if job.state in FINAL_STATES],
        "a hook to run",
    )
    wait_for(lambda: all(job.state in FINAL_STATES for job in ledger.jobs.list(JobFilter())), "every job to end")
    kinds = sorted(job.enqueued_by or "" for job in ledger.jobs.list(JobFilter(queue="hooks")))
    [job] = ledger.jobs.list(JobFilter(queue="work"))
    expected = {"succeeded": ["after_success"], "failed": ["after_crash", "after_failure"]}[job.state]
    assert kinds == [f"{kind} of job {job.id}" for kind in expected]
