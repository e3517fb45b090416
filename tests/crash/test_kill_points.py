"""Killed at each named point: nothing lost, nothing finished twice, nothing held by who does not know it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked
from tests.crash.conftest import MakeFleet
from tests.fleet import ROOT, TASKS, Fleet, wait_for
from tests.history import check_history

from unstuck.domain.states import AttemptState, JobState

JOBS = 12

WORKER_POINTS = [
    "worker.after_claim=kill",
    "worker.after_start=kill",
    "worker.before_settle=kill",
    "turn.before_commit=kill:2",
    "turn.before_commit=kill:4",
    "turn.after_commit=kill:2",
    "turn.after_commit=kill:4",
    "beat.before=kill",
]


def check_all_ended(fleet: Fleet, ids: list[int]) -> None:
    wait_for(lambda: len(fleet.ledger.outcomes(ids)) == len(ids), "every job to end")
    check_history(fleet.ledger, ids)
    assert not [worker for worker in fleet.ledger.watch() if worker.held], "somebody still holds a finished job"


@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_worker_is_killed_at(fleet: Fleet, point: str) -> None:
    survivor = fleet.start("--queues", "default", "--concurrency", "2")
    jobs = fleet.task("add").options(queue="other").enqueue_many([(n, 1) for n in range(JOBS)])
    jobs += fleet.task("add_again").options(queue="other").enqueue_many([(n, 1) for n in range(JOBS)])
    victim = fleet.start("--queues", "other", "--concurrency", "2", wait=False, UNSTUCK_FAILPOINTS=point)
    assert victim.process.wait(60) == -signal.SIGKILL
    fleet.start("--queues", "other", "--concurrency", "2")
    ids = [job.id for job in jobs]
    check_all_ended(fleet, ids)
    states = {job.id: fleet.state(job) for job in jobs}
    assert all(states[job.id] is JobState.SUCCEEDED for job in jobs[JOBS:]), "a job to be retried was lost"
    if point == "worker.after_claim=kill":
        assert set(states.values()) == {JobState.SUCCEEDED}, "user code never ran: going back is free"
    assert survivor.process.poll() is None


@pytest.mark.parametrize("point", ["turn.answer_lost=raise:2", "turn.answer_lost=raise:3", "turn.answer_lost=raise:5"])
def test_the_answer_of_a_committed_turn_is_lost(fleet: Fleet, point: str, tmp_path: Path) -> None:
    jobs = [fleet.task("nap").enqueue(0.01, str(tmp_path / f"job-{n}")) for n in range(JOBS)]
    jobs += fleet.task("add_again").enqueue_many([(n, 1) for n in range(JOBS)])
    worker = fleet.start("--concurrency", "2", UNSTUCK_FAILPOINTS=point)
    ids = [job.id for job in jobs]
    check_all_ended(fleet, ids)
    assert {fleet.state(job) for job in jobs} == {JobState.SUCCEEDED}
    for n in range(JOBS):
        assert (tmp_path / f"job-{n}").read_text().count("begun") == 1, "user code ran twice"
    assert worker.process.poll() is None


@pytest.mark.parametrize("point", ["sweep.after_verdict", "sweep.before_settle", "sweep.after_settle"])
def test_the_watchman_is_killed_inside_the_sweep(fleet: Fleet, point: str) -> None:
    """The verdict stands; whoever comes next finishes the burial."""
    victim = fleet.start("--queues", "other", "--concurrency", "2")
    jobs = [fleet.task("nap_again").options(queue="other").enqueue(0.3) for _ in range(4)]
    fleet.wait_running(jobs[0])
    victim.kill_family()
    surroundings = {**os.environ, "UNSTUCK_FAILPOINTS": f"{point}=kill"}
    reaper = forked.run("unstuck.cli.main", "reaper", "--once", "--url", fleet.url, cwd=ROOT, env=surroundings)
    assert reaper.returncode == -signal.SIGKILL, reaper.stderr
    fleet.start("--queues", "other", "--concurrency", "2")
    check_all_ended(fleet, [job.id for job in jobs])
    assert {fleet.state(job) for job in jobs} == {JobState.SUCCEEDED}


@pytest.mark.parametrize(("point", "stored"), [("enqueue.before_commit=kill", 0), ("enqueue.after_commit=kill", 1)])
def test_a_client_is_killed_inside_enqueue(fleet: Fleet, point: str, stored: int) -> None:
    surroundings = {**os.environ, "UNSTUCK_URL": fleet.url, "UNSTUCK_FAILPOINTS": point}
    client = forked.run("unstuck.cli.main", "enqueue", "add", "1", "2", "--app", TASKS, cwd=ROOT, env=surroundings)
    assert client.returncode == -signal.SIGKILL, client.stderr
    assert fleet.ledger.count_jobs().get("pending", 0) == stored
    # Nothing is left locked behind it.
    assert fleet.task("add").enqueue(1, 2).record().state is JobState.PENDING


@pytest.mark.parametrize("point", ["migrate.between", "migrate.before_commit"])
@pytest.mark.usefixtures("untouched")
def test_a_migration_is_killed_and_run_again(url: str, make_fleet: MakeFleet, point: str) -> None:
    killed = subprocess.run(
        [sys.executable, "-m", "unstuck.cli.main", "migrate", "--url", url],
        cwd=ROOT,
        env={**os.environ, "UNSTUCK_FAILPOINTS": f"{point}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    fleet = make_fleet()
    fleet.start()
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


@pytest.mark.parametrize("point", ["runner.before_user_code=kill", "runner.after_user_code=kill"])
def test_a_runner_is_killed_around_user_code(fleet: Fleet, point: str) -> None:
    """Each fresh runner dies once at this point, so a retried job ends up quarantined and a plain one fails."""
    fleet.start("--concurrency", "1", UNSTUCK_FAILPOINTS=point)
    plain = fleet.task("add").enqueue(1, 2)
    again = fleet.task("add_again").enqueue(1, 2)
    check_all_ended(fleet, [plain.id, again.id])
    assert fleet.state(plain) is JobState.FAILED
    assert fleet.state(again) is JobState.QUARANTINED
    assert all(attempt.state is AttemptState.CRASHED for attempt in fleet.ledger.attempts(again.id))
