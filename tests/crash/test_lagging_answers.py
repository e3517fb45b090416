"""The ledger says for a while that a worker does not hold its job, as a server that lags behind does."""

from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import psutil
import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import wait_for

from unstuck.domain.states import AttemptState, JobState

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
    runner = psutil.Process(int(notes.read_text().split()[1]))
    meddle(f"worker_id = 'somebody else' where id = {job.id}")
    wait_for(lambda: "Stopping an attempt that was superseded" in worker.said(), "the comparison")
    wait_for(lambda: not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE, "the end of the runner")
    meddle(f"worker_id = '{worker.id}' where id = {job.id}")
    # On the way back to the queue for free it would begin again.
    wait_for(lambda: fleet.ledger.attempts(job.id)[0].ended_at is not None, "the end of the attempt")
    assert fleet.ledger.attempts(job.id)[0].state is AttemptState.CRASHED
    fleet.wait_final(job)
    assert fleet.state(job) is end
    attempts = fleet.ledger.attempts(job.id)
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
