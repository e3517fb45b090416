"""Workers are killed at random while jobs stand in lines and in a narrow queue: never too many at once, never stuck."""

import random
import time
from pathlib import Path

import pytest
from tests.crash import lined_tasks
from tests.crash.chaos import _strike, _wait_until_all_ended
from tests.fleet import Fleet

from unstuck import App
from unstuck.client.job import Job
from unstuck.domain.states import JobState

TARGET = "tests.crash.lined_tasks:app"
KEYS = 4
STRIKES = ("worker", "family", "nursery", "runner", "runner", "runner")


class LinedFleet(Fleet):
    def _app(self, settings: dict[str, object]) -> App:
        app = App(self.url, queues=["narrow"], **settings)  # type: ignore[arg-type]
        for definition in lined_tasks.app.definitions.values():
            app.adopt(definition)
        return app

    def reinforce(self) -> None:
        self.start("--concurrency", "2", wait=False, target=TARGET)


@pytest.mark.parametrize(
    ("workers", "jobs", "strikes"), [(4, 45, 6), pytest.param(10, 600, 120, marks=pytest.mark.long)]
)
def test_never_two_of_one_key_and_never_stuck(url: str, tmp_path: Path, workers: int, jobs: int, strikes: int) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    fleet = LinedFleet(url, tmp_path)
    try:
        for _ in range(workers):
            fleet.reinforce()
        fleet.wait_active(fleet.workers[0])
        work: list[Job] = []
        for number in range(jobs):
            if number % 3:
                work.append(fleet.task("serve").enqueue(f"c{number % KEYS}", str(tmp_path), 0.02))
            else:
                work.append(fleet.task("squeeze").enqueue(str(tmp_path), 0.02))
        kills = 0
        while kills < strikes:
            time.sleep(chance.uniform(0.05, 0.5))  # The rhythm of the disaster, not luck.
            worker = chance.choice([one for one in fleet.workers if one.process.poll() is None])
            what = chance.choice(STRIKES)
            kills += _strike(worker.family(), what)
            if what in ("worker", "family"):
                worker.process.wait(10)
                fleet.reinforce()
            if sum(line.blocked for line in fleet.ledger.lines()) < KEYS:
                # There is always somebody in line while processes die.
                work += [fleet.task("serve").enqueue(f"c{n % KEYS}", str(tmp_path), 0.02) for n in range(jobs // 3)]
        _wait_until_all_ended(fleet, [job.id for job in work], 240.0)
        print(f"{kills} kills, {len(work)} jobs")
        assert [fleet.state(job) for job in work] == [JobState.SUCCEEDED] * len(work)
        assert list(tmp_path.glob("together-*")) == []
        assert all(job.result() for job in work)
        assert not [event for event in fleet.ledger.events(limit=10_000) if event.kind == "line_repaired"]
    finally:
        fleet.close()
