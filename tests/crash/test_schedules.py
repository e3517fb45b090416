"""Workers that keep the clock are killed: no tick is missing, none is doubled."""

import itertools
import random
import re
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest
from tests.chaos.__main__ import _strike, _wait_until_all_ended
from tests.crash.apps import concurrency
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, copy_tasks, wait_for

from unstuck import App
from unstuck.client.job import Job
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.contract.jobs import JobFilter, JobRecord

SCHEDULES_APP = "tests.crash.apps.schedules:app"
FAST = {"heartbeat_interval": "300ms"}


KILL_EVERY_S = 2.37


def enqueued(fleet: Fleet) -> list[JobRecord]:
    return list(reversed(fleet.ledger.jobs.list(JobFilter(limit=1000))))


def nominal(job: JobRecord) -> str:
    found = re.fullmatch(r"schedule pulse for (\S+)", job.enqueued_by or "")
    assert found is not None, job.enqueued_by
    return found[1]


def seconds_of(jobs: list[JobRecord]) -> list[int]:
    return [int(datetime.fromisoformat(nominal(job)).timestamp()) for job in jobs]


def check_ticks(fleet: Fleet) -> None:
    jobs = enqueued(fleet)
    ticks = seconds_of(jobs)
    assert ticks == list(range(ticks[0], ticks[0] + len(ticks))), "a tick is missing, doubled or out of order"
    [record] = fleet.ledger.schedules.list()
    assert record.last_at == ticks[-1], "the schedule knows of a tick that was not enqueued"
    assert record.last_job_id == jobs[-1].id


def kill_in_turn(fleet: Fleet, seconds: float, tmp_path: Path) -> None:
    """Three workers; one after the other is killed and replaced, at moments of its own."""

    def start(wait: bool = False) -> None:
        fleet.start("--concurrency", "1", target=SCHEDULES_APP, wait=wait, TICKS_TO=str(tmp_path / "ticks"))

    for wait in (False, False, True):
        start(wait)
    begun_s = time.monotonic()
    # Moments that wander through the second: some fall right upon a tick.
    for number in itertools.count():
        due_s = begun_s + number * KILL_EVERY_S
        if due_s - begun_s > seconds:
            break
        time.sleep(max(0.0, due_s - time.monotonic()))
        living = [worker for worker in fleet.workers if worker.process.poll() is None]
        living[0].kill()
        start()
    # The last one was killed before the time was over; the first tick may fall behind the first kill.
    least = int((number - 1) * KILL_EVERY_S) - 1
    wait_for(lambda: len(enqueued(fleet)) >= least, f"{least} ticks")
    wait_for(lambda: all(job.state in FINAL_STATES for job in enqueued(fleet)), "every job of a tick to end")
    check_ticks(fleet)
    noted = {line.split()[1] for line in (tmp_path / "ticks").read_text().splitlines()}
    done = [job for job in enqueued(fleet) if job.state is JobState.SUCCEEDED]
    assert {str(tick) for tick in seconds_of(done)} <= noted, "user code saw every tick that succeeded"


def test_three_workers_are_killed_in_turn(make_fleet: MakeFleet, tmp_path: Path) -> None:
    kill_in_turn(make_fleet(**FAST), 9.0, tmp_path)


@pytest.mark.long
def test_three_workers_are_killed_in_turn_for_a_minute(make_fleet: MakeFleet, tmp_path: Path) -> None:
    kill_in_turn(make_fleet(**FAST), 60.0, tmp_path)


@pytest.mark.parametrize("point", ["schedule.before_commit=kill:2", "schedule.after_commit=kill:2"])
def test_a_worker_is_killed_around_the_commit_of_a_tick(make_fleet: MakeFleet, tmp_path: Path, point: str) -> None:
    fleet = make_fleet(**FAST)
    places = {"TICKS_TO": str(tmp_path / "ticks")}
    victim = fleet.start("--concurrency", "1", target=SCHEDULES_APP, wait=False, UNSTUCK_FAILPOINTS=point, **places)
    assert victim.process.wait(60) == -signal.SIGKILL
    before = len(enqueued(fleet))
    assert before == (2 if "after" in point else 1)
    fleet.start("--concurrency", "1", target=SCHEDULES_APP, **places)
    wait_for(lambda: len(enqueued(fleet)) >= before + 3, "more ticks")
    check_ticks(fleet)


CONCURRENCY_APP = "tests.crash.apps.concurrency:app"
KEYS = 4
STRIKES = ("worker", "family", "fork server", "runner", "runner", "runner")


class LinedFleet(Fleet):
    def _app(self, settings: dict[str, object]) -> App:
        app = App(self.url, queues=["narrow"], **settings)  # type: ignore[arg-type]
        copy_tasks(concurrency.app, app)
        return app

    def reinforce(self) -> None:
        self.start("--concurrency", "2", wait=False, target=CONCURRENCY_APP)


@pytest.mark.parametrize(
    ("workers", "jobs", "strikes"), [(4, 45, 6), pytest.param(10, 600, 120, marks=pytest.mark.long)]
)
def test_never_two_of_one_key_and_never_stuck(
    url: str, tmp_path: Path, seed: int, workers: int, jobs: int, strikes: int
) -> None:
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
            if sum(line.blocked for line in fleet.ledger.queues.concurrency_keys()) < KEYS:
                # There is always somebody in line while processes die.
                work += [fleet.task("serve").enqueue(f"c{n % KEYS}", str(tmp_path), 0.02) for n in range(jobs // 3)]
        _wait_until_all_ended(fleet, [job.id for job in work], 240.0)
        print(f"{kills} kills, {len(work)} jobs")
        assert [fleet.state(job) for job in work] == [JobState.SUCCEEDED] * len(work)
        assert list(tmp_path.glob("together-*")) == []
        assert all(job.result() for job in work)
        assert not [event for event in fleet.ledger.events.list(limit=10_000) if event.kind == "line_repaired"]
    finally:
        fleet.close()
