"""The next version migrates the tables while processes of the last release run: they are our own code here."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import apsw
import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.crash.test_supervisor import Up
from tests.support.fleet import ROOT, Fleet, wait_for
from tests.support.next_release import migrate_to_next
from tests.support.signals import send_signal

from unstuck.domain.states import JobState

CLIENT = """
from tests.crash.apps import tasks as t
from tests.support.fleet import copy_tasks
from unstuck import App
app = App()
copy_tasks(t.app, app)
print(app.task_by_name("add").enqueue(2, 3).result(timeout=30))
"""
pytestmark = pytest.mark.usefixtures("untouched")


@pytest.fixture
def up(fleet: Fleet) -> Iterator[Up]:
    supervisor = Up(fleet, 1)
    yield supervisor
    supervisor.close()


def run(fleet: Fleet, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a fresh process of the last release to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=fleet.surroundings(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_running_worker_finishes_its_job_and_goes_on_when_the_next_version_migrates(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    gate = fleet.folder / "gate"
    job, _ = fleet.begin("wait_for_file", str(gate))
    migrate_to_next(fleet.url)
    assert fleet.state(job) is JobState.RUNNING
    gate.touch()
    assert job.result(timeout=30) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.stop() == 0


def test_a_worker_that_dies_after_the_migration_is_replaced_by_its_supervisor(fleet: Fleet, up: Up) -> None:
    [victim] = up.active()
    migrate_to_next(fleet.url)
    send_signal(victim.pid, signal.SIGKILL)
    wait_for(lambda: [one for one in up.active() if one.pid != victim.pid], "a replacement")
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_a_fresh_process_of_the_last_release_enqueues_and_gets_results(fleet: Fleet) -> None:
    migrate_to_next(fleet.url)
    fleet.start("--concurrency", "1")
    client = run(fleet, "-c", CLIENT)
    assert client.stdout == "5\n", client.stderr
    again = run(fleet, "-m", "unstuck.cli.main", "migrate", "--json")
    assert json.loads(again.stdout)["applied"] == [], again.stderr
    found = run(fleet, "-m", "unstuck.cli.main", "doctor", "--json")
    assert "schema" not in found.stdout, found.stdout


def test_code_that_the_next_version_no_longer_works_with_is_refused_and_told_what_to_install(fleet: Fleet) -> None:
    name = migrate_to_next(fleet.url, compatible=False)
    number = int(name[:4])
    for arguments in (
        ("-c", CLIENT),
        ("-m", "unstuck.cli.main", "worker", "tests.crash.apps.tasks:app"),
        ("-m", "unstuck.cli.main", "migrate"),
    ):
        refused = run(fleet, *arguments)
        assert refused.returncode == 1, refused.stderr
        assert f"need code that knows {number} or later" in " ".join(refused.stderr.split())
        assert "Upgrade Unstuck here to" in " ".join(refused.stderr.split())
    found = run(fleet, "-m", "unstuck.cli.main", "doctor", "--json")
    assert "schema-ahead" in found.stdout


TURN = ("turn_v1", "unstuck_jobs", "result")
BEAT = ("beat_v1", "unstuck_worker_heartbeats", "beat_at")
"""A function on PostgreSQL, a table and its column on SQLite."""


def take_away(url: str, what: tuple[str, str, str], *, back: bool = False) -> None:
    """Take away what our code uses, as an incompatible version would; or bring it back."""
    function, table, column = what
    if url.startswith("sqlite"):
        connection = apsw.Connection(url.removeprefix("sqlite:///"))
        connection.set_busy_timeout(5000)
        old, new = (f"gone_{column}", column) if back else (column, f"gone_{column}")
        connection.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
        connection.close()
        return
    with psycopg.connect(url, autocommit=True) as newer:
        old, new = (f"gone_{function}", function) if back else (function, f"gone_{function}")
        newer.execute(f"alter function unstuck.{old} rename to {new}".encode())


def test_a_worker_whose_functions_are_gone_drains_and_names_the_outcomes_that_it_could_not_record(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(shutdown_grace="3s")
    worker = fleet.start("--concurrency", "2")
    gate = fleet.folder / "gate"
    first, _ = fleet.begin("wait_for_file", str(gate))
    second, _ = fleet.begin("wait_for_file", str(gate))
    take_away(fleet.url, TURN)
    gate.touch()
    assert worker.process.wait(30) == 1
    said = worker.said()
    assert "The tables of the ledger no longer work with this version; draining" in said
    lost = [line for line in said.splitlines() if "The outcome of a job could not be recorded" in line]
    assert len(lost) == 2, said
    assert all(any(f"job_id={job.id}" in line and "succeeded" in line for line in lost) for job in (first, second))
    assert "upgrade Unstuck here" in said or "unstuck migrate" in said


def test_outcomes_are_recorded_when_what_was_missing_comes_back(make_fleet: MakeFleet) -> None:
    """A migration of several files may take a function away and bring it back."""
    fleet = make_fleet(shutdown_grace="20s")
    worker = fleet.start("--concurrency", "1")
    gate = fleet.folder / "gate"
    job, _ = fleet.begin("wait_for_file", str(gate))
    take_away(fleet.url, TURN)
    gate.touch()
    wait_for(lambda: "no longer work with this version" in worker.said(), "the worker to notice")
    take_away(fleet.url, TURN, back=True)
    assert job.result(timeout=30) == "rested"
    assert worker.process.wait(30) == 1, "its place is filled by its supervisor, with the version that is installed"


def test_a_worker_that_can_no_longer_send_heartbeats_hands_in_its_outcomes_and_leaves(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="20s", shutdown_grace="15s")
    worker = fleet.start("--concurrency", "1")
    gate = fleet.folder / "gate"
    job, _ = fleet.begin("wait_for_file", str(gate))
    take_away(fleet.url, BEAT)
    wait_for(lambda: "no longer work with this version" in worker.said(), "the worker to notice")
    gate.touch()
    assert worker.process.wait(30) == 1
    record = fleet.ledger.jobs.get(job.id)
    assert record is not None
    assert record.state is JobState.SUCCEEDED
