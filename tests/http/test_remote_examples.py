"""The example workers, in JavaScript and in bash: at work, through a restart of the server, killed."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.backdoor import backdoor_of
from tests.support.fleet import ROOT, wait_for
from tests.support.http_server import Served, fall_silent, serve
from tests.support.postgres import reserve_port
from tests.support.signals import descendants, signal_group

from unstuck.config import Settings
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobRecord, NewJob
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.open import ready_ledger

QUICK = {"UNSTUCK_CHECK_INTERVAL": "0.1", "UNSTUCK_HTTP_HEARTBEAT_INTERVAL": "0.5s"}
"""Beats come soon. The lease is the default, so that no worker is given up because the machine is slow."""
EXAMPLES = {"node": ["node", "examples/worker.mjs"], "bash": ["bash", "examples/worker.sh"]}
TOLD_TO_STOP = ("SIGTERM: finishing", "told to go")
NEEDED = {"node": ("node",), "bash": ("bash", "curl", "jq", "ps")}


LEDGERS = {"node": "sqlite", "bash": "postgresql"}
"""They speak to the door alone, which is tested on both: each sees one of them."""


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, command: list[str]) -> str:
    if LEDGERS[command[0]] == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("ready_pg_url"))


@pytest.fixture(params=EXAMPLES)
def command(request: pytest.FixtureRequest) -> list[str]:
    missing = [program for program in NEEDED[request.param] if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    return EXAMPLES[request.param]


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    ledger = ready_ledger(Settings(url=url))
    yield ledger
    ledger.close()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that a second server can take after the first."""
    with reserve_port() as reserved:
        yield int(reserved.getsockname()[1])


@contextmanager
def example(command: list[str], port: int, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example worker in a process group of its own; nothing of it is left at the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "UNSTUCK_SERVER": f"http://127.0.0.1:{port}", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait(20)


def served(url: str, port: int) -> AbstractContextManager[Served]:
    return serve(url, "--port", str(port), env=QUICK)


def put(ledger: Ledger, task: str, *args: object) -> int:
    policy = b'{"on_crash":"retry"}'
    job = NewJob(task, "default", json.dumps({"args": args}).encode(), policy=policy, on_crash="retry")
    [stored] = ledger.jobs.enqueue([job])
    ledger.notify({"queue:default"})
    return stored.job_id


def job_of(ledger: Ledger, job_id: int) -> JobRecord:
    record = ledger.jobs.get(job_id)
    assert record is not None
    return record


def living(ledger: Ledger) -> list[WorkerRecord]:
    return [worker for worker in ledger.workers.list(living_only=True) if worker.state is WorkerState.ACTIVE]


def until(ledger: Ledger, job_id: int, state: JobState, log: Path) -> JobRecord:
    try:
        wait_for(lambda: job_of(ledger, job_id).state is state, f"job {job_id} {state}")
    except AssertionError as error:
        raise AssertionError(f"{error}: it is {job_of(ledger, job_id)}\n{log.read_text()}") from None
    return job_of(ledger, job_id)


def test_it_works_and_leaves_in_order(url: str, ledger: Ledger, command: list[str], port: int, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with served(url, port), example(command, port, log) as process:
        greeted, failed = put(ledger, "greet", "Ada"), put(ledger, "boom")
        assert until(ledger, greeted, JobState.SUCCEEDED, log).result == b'"Hello, Ada"'
        error = until(ledger, failed, JobState.FAILED, log).error
        assert error is not None
        assert error.code == "TASK_FAILED"
        napping = put(ledger, "nap", 2)
        wait_for(lambda: ledger.jobs.progress([napping]), "its progress")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: any(note in log.read_text() for note in TOLD_TO_STOP), "it to know that it shall stop")
        # What runs is finished, and what is there besides is left to others.
        waiting = put(ledger, "greet", "Bob")
        assert process.wait(60) == 0, log.read_text()
        assert (job_of(ledger, napping).state, job_of(ledger, napping).result) == (JobState.SUCCEEDED, b"2")
        assert job_of(ledger, waiting).state is JobState.PENDING
        assert [worker.state for worker in ledger.workers.list()] == [WorkerState.STOPPED]


def test_its_job_outlives_a_restart_of_the_server(
    url: str, ledger: Ledger, command: list[str], port: int, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        first = server.enter_context(served(url, port))
        stack.enter_context(example(command, port, log))
        napping = put(ledger, "nap", 3)
        until(ledger, napping, JobState.RUNNING, log)
        token = job_of(ledger, napping).token
        first.process.kill()
        server.close()
        stack.enter_context(served(url, port))
        done = until(ledger, napping, JobState.SUCCEEDED, log)
        assert (done.token, done.attempt, done.result) == (token, 1, b"3")
        # And it is at work again.
        assert until(ledger, put(ledger, "greet", "Ada"), JobState.SUCCEEDED, log).attempt == 1
        assert len(ledger.workers.list()) == 1


def test_killed_it_loses_its_job_to_another(
    url: str, ledger: Ledger, command: list[str], port: int, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    with served(url, port), ExitStack() as stack:
        first = stack.enter_context(example(command, port, log))
        napping = put(ledger, "nap", 600)
        until(ledger, napping, JobState.RUNNING, log)
        [worker] = living(ledger)
        wait_for(lambda: living(ledger)[0].last_seen_at > worker.last_seen_at, "a heartbeat while it works")
        assert job_of(ledger, napping).worker_id == worker.id
        family = [*descendants(first.pid)]
        first.kill()
        first.wait()
        wait_for(lambda: all(process.ended for process in family), "whatever beats for it to end, too")
        fall_silent(ledger, backdoor_of(url), worker.id)
        stack.enter_context(example(command, port, tmp_path / "second.log"))
        wait_for(lambda: job_of(ledger, napping).worker_id not in (None, worker.id), "another to take the job")
        taken = until(ledger, napping, JobState.RUNNING, log)
        assert (taken.attempt, taken.crash_count) == (2, 1)
        dead = ledger.workers.remote(worker.id)
        assert dead is not None
        assert dead.verdict is not None
        assert (dead.state, dead.verdict.detector) == (WorkerState.DEAD, "lease")
