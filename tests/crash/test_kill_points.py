"""Killed at each named point: nothing lost, nothing finished twice, nothing held by who does not know it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import psutil
import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.support import processes
from tests.support.fleet import ROOT, TASKS, Fleet, wait_for
from tests.support.job_history import check_history
from tests.support.signals import OwnProcess

from unstuck.domain.states import AttemptState, JobState

pytestmark = pytest.mark.both_databases

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
    wait_for(lambda: len(fleet.ledger.jobs.outcomes(ids)) == len(ids), "every job to end")
    check_history(fleet.ledger, ids)
    assert not [worker for worker in fleet.ledger.recovery.watch() if worker.held], (
        "somebody still holds a finished job"
    )


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


@pytest.mark.parametrize("point", ["reap.after_declare_dead", "reap.before_settle", "reap.after_settle"])
def test_the_reaper_is_killed_inside_the_sweep(fleet: Fleet, point: str) -> None:
    """The verdict stands; whoever comes next finishes the burial."""
    victim = fleet.start("--queues", "other", "--concurrency", "2")
    jobs = [fleet.task("nap_again").options(queue="other").enqueue(0.3) for _ in range(4)]
    fleet.wait_running(jobs[0])
    victim.kill_family()
    surroundings = {**os.environ, "UNSTUCK_FAILPOINTS": f"{point}=kill"}
    reaper = processes.run("unstuck.cli.main", "reaper", "--once", "--url", fleet.url, cwd=ROOT, env=surroundings)
    assert reaper.returncode == -signal.SIGKILL, reaper.stderr
    fleet.start("--queues", "other", "--concurrency", "2")
    check_all_ended(fleet, [job.id for job in jobs])
    assert {fleet.state(job) for job in jobs} == {JobState.SUCCEEDED}


@pytest.mark.parametrize(("point", "stored"), [("enqueue.before_commit=kill", 0), ("enqueue.after_commit=kill", 1)])
def test_a_client_is_killed_inside_enqueue(fleet: Fleet, point: str, stored: int) -> None:
    surroundings = {**os.environ, "UNSTUCK_URL": fleet.url, "UNSTUCK_FAILPOINTS": point}
    client = processes.run("unstuck.cli.main", "enqueue", "add", "1", "2", "--app", TASKS, cwd=ROOT, env=surroundings)
    assert client.returncode == -signal.SIGKILL, client.stderr
    assert fleet.ledger.jobs.count().get("pending", 0) == stored
    # Nothing is left locked behind it.
    assert fleet.task("add").enqueue(1, 2).record().state is JobState.PENDING


# tests/contract/test_migrations.py shows the same without a worker.
@pytest.mark.long
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
    assert all(attempt.state is AttemptState.CRASHED for attempt in fleet.ledger.jobs.attempts(again.id))


QUICK = {"heartbeat_interval": "0.3s", "heartbeat_timeout": "20s"}
Meddle = Callable[[str], None]


@pytest.fixture
def meddle(url: str) -> Iterator[Meddle]:
    """Change rows of jobs behind the ledger's back."""
    if url.startswith("sqlite"):
        file = apsw.Connection(url.removeprefix("sqlite:///"))
        file.set_busy_timeout(10_000)
        yield lambda change: list(file.execute(f"update unstuck_jobs set {change}")) and None
        file.close()
    else:
        with psycopg.connect(url, autocommit=True) as server:
            yield lambda change: server.execute(f"update unstuck.jobs set {change}".encode()) and None


@pytest.mark.parametrize(("task", "end"), [("nap", JobState.FAILED), ("nap_once_then_quick", JobState.SUCCEEDED)])
def test_a_job_whose_runner_we_killed_is_handed_in_by_its_policy_and_never_given_back_for_free(
    make_fleet: MakeFleet, meddle: Meddle, tmp_path: Path, task: str, end: JobState
) -> None:
    fleet = make_fleet(**QUICK)
    worker = fleet.start("--concurrency", "1")
    notes = tmp_path / "notes"
    job = fleet.task(task).enqueue(60.0, str(notes))
    wait_for(lambda: notes.exists() and "\n" in notes.read_text(), "the job to begin")
    runner = OwnProcess(int(notes.read_text().split()[1]))
    meddle(f"worker_id = 'somebody else' where id = {job.id}")
    wait_for(lambda: "Stopping an attempt that was superseded" in worker.said(), "the comparison")
    wait_for(lambda: not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE, "the end of the runner")
    meddle(f"worker_id = '{worker.id}' where id = {job.id}")
    # On the way back to the queue for free it would begin again.
    wait_for(lambda: fleet.ledger.jobs.attempts(job.id)[0].ended_at is not None, "the end of the attempt")
    assert fleet.ledger.jobs.attempts(job.id)[0].state is AttemptState.CRASHED
    fleet.wait_final(job)
    assert fleet.state(job) is end
    attempts = fleet.ledger.jobs.attempts(job.id)
    assert notes.read_text().count("begun") == len(attempts) == (1 if end is JobState.FAILED else 2)
    assert "the ledger said for a while that it was not ours" in (attempts[0].cause or "")
    assert job.record().crash_count == 0, "the job is not to blame"


def test_a_job_whose_beginning_the_ledger_forgot_ends_as_its_code_does(
    make_fleet: MakeFleet, meddle: Meddle, tmp_path: Path
) -> None:
    """A failover to a server that lagged behind: there the job is only claimed, and what is claimed cannot be ended."""
    fleet = make_fleet(**QUICK)
    fleet.start("--concurrency", "1")
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    job = fleet.task("wait_for_file").enqueue(str(gate), str(notes))
    wait_for(lambda: notes.exists() and "\n" in notes.read_text(), "the job to begin")
    meddle(f"state = 'claimed', started_at = null, attempt = attempt - 1 where id = {job.id}")
    wait_for(lambda: fleet.state(job) is JobState.RUNNING, "the job to run again by the ledger's word")
    gate.touch()
    fleet.wait_final(job)
    assert fleet.state(job) is JobState.SUCCEEDED
    assert notes.read_text().count("begun") == 1
