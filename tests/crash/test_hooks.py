"""Jobs end, by a worker or by the reaper, and what follows them is enqueued once."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, wait_for

from unstuck import App
from unstuck.domain.states import FINAL
from unstuck.store.records import JobFilter

TARGET = "tests.crash.hooked_tasks:app"
FAST = {"heartbeat_interval": "300ms", "heartbeat_timeout": "1500ms"}


class Hooked:
    def __init__(self, fleet: Fleet, notes: Path) -> None:
        self.fleet = fleet
        self.notes = notes
        self.app = App(fleet.url, queues=["hooks", "work"])
        for definition in importlib.import_module("tests.crash.hooked_tasks").app._definitions.values():
            self.app.adopt(definition)

    def start(self, *arguments: str, **more: Any) -> Any:
        return self.fleet.start(*arguments, target=TARGET, NOTES_TO=str(self.notes), **more)

    def said(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def settle(self, count: int) -> "Counter[str]":
        """Wait until so many hooks have been enqueued and all has ended; give what they noted, without the ids."""
        ledger = self.fleet.ledger
        wait_for(lambda: len(ledger.jobs(JobFilter(queue="hooks"))) >= count, f"{count} hooks")
        wait_for(lambda: all(job.state in FINAL for job in ledger.jobs(JobFilter())), "every job to end")
        assert len(ledger.jobs(JobFilter(queue="hooks"))) == count
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


@pytest.mark.parametrize("point", ["turn.before_commit=kill:2", "turn.after_commit=kill:2"])
def test_a_worker_is_killed_around_the_turn_that_ends_it(hooked: Hooked, point: str) -> None:
    hooked.app.task_by_name("nap").enqueue(0.0)
    victim = hooked.start("--queues", "work", "--concurrency", "1", wait=False, UNSTUCK_FAILPOINTS=point)
    wait_for(lambda: victim.process.poll() is not None or len(hooked.said()) > 1, "the kill")
    hooked.start("--queues", "hooks,work", "--concurrency", "1")
    ledger = hooked.fleet.ledger
    wait_for(lambda: [job for job in ledger.jobs(JobFilter(queue="hooks")) if job.state in FINAL], "a hook to run")
    wait_for(lambda: all(job.state in FINAL for job in ledger.jobs(JobFilter())), "every job to end")
    kinds = sorted(job.enqueued_by or "" for job in ledger.jobs(JobFilter(queue="hooks")))
    [job] = ledger.jobs(JobFilter(queue="work"))
    expected = {"succeeded": ["after_success"], "failed": ["after_crash", "after_failure"]}[job.state]
    assert kinds == [f"{kind} of job {job.id}" for kind in expected]
