"""The ledger is deleted, moved away or replaced under running workers: nobody goes on in another one.

The processes that know the ledger wait for it, and go on when it is back. New ones refuse to begin an empty one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.crash.test_supervisor import Up, start, started
from tests.support.fleet import ROOT, TASKS, Fleet, wait_for
from tests.support.signals import send_signal
from tests.support.sqlite import ready_sqlite

from unstuck.config import Settings
from unstuck.domain.states import JobState
from unstuck.errors import LedgerReplaced
from unstuck.ledger.open import open_ledger, ready_ledger

__all__ = ["started"]

only_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
GONE = "was deleted or moved"


@pytest.fixture
def path(fleet: Fleet) -> Path:
    return Path(fleet.url.removeprefix("sqlite:///"))


def take_away(path: Path) -> list[tuple[Path, Path]]:
    """Move the ledger's files away, as somebody does who tidies up; the lock file is none of theirs."""
    found = [file for suffix in ("", "-wal", "-shm") if (file := path.with_name(path.name + suffix)).exists()]
    moved = [(file, file.with_name(f"away-{file.name}")) for file in found]
    for file, away in moved:
        file.rename(away)
    return moved


def put_back(moved: list[tuple[Path, Path]]) -> None:
    for file, away in reversed(moved):
        away.rename(file)


def unstuck(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unstuck.cli.main", *arguments]
    environment = {**os.environ, "UNSTUCK_URL": fleet.url}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@only_sqlite
def test_jobs_go_on_when_the_file_is_put_back(fleet: Fleet, path: Path) -> None:
    worker = fleet.start()
    ends_meanwhile, _ = fleet.begin("nap", 1.0)
    goes_on, _ = fleet.begin("nap", 8.0)
    moved = take_away(path)
    wait_for(lambda: GONE in worker.said(), "the worker says what happened")
    for arguments in (["enqueue", f"{TASKS}.add", "1", "2"], ["worker", TASKS], ["migrate"], ["jobs"]):
        answer = unstuck(fleet, *arguments)
        assert answer.returncode != 0, (arguments, answer.stdout, answer.stderr)
        assert GONE in answer.stdout + answer.stderr, (arguments, answer.stdout, answer.stderr)
        assert not path.exists(), arguments
    with pytest.raises(LedgerReplaced, match=GONE):
        fleet.ledger.jobs.count()
    put_back(moved)
    for job in (ends_meanwhile, goes_on):
        fleet.wait_state(job, JobState.SUCCEEDED)
    assert worker.process.poll() is None
    assert worker.record() is not None
    assert "unstuck migrate" not in worker.said()


@only_sqlite
def test_a_worker_never_goes_on_in_a_file_that_holds_another_ledger(
    fleet: Fleet, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    worker = fleet.start()
    job, _ = fleet.begin("nap", 1.0)
    moved = take_away(path)
    # With the lock file gone too nobody can know that there was one: a new client begins afresh.
    path.with_name(path.name + "-lock").unlink()
    other = ready_ledger(Settings(url=fleet.url))
    wait_for(lambda: "another ledger" in worker.said(), "the worker says what happened")
    assert other.workers.list() == []
    with pytest.raises(LedgerReplaced, match="another ledger"):
        fleet.ledger.jobs.count()
    other.close()
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    put_back(moved)
    fleet.wait_state(job, JobState.SUCCEEDED)


@only_sqlite
def test_a_replacement_under_up_begins_no_ledger_of_its_own(fleet: Fleet, path: Path, started: list[Up]) -> None:
    up = start(started, fleet)
    [victim] = up.active()
    job, _ = fleet.begin("nap", 600.0)
    # Everything: not even the lock file is left to tell that there was a ledger.
    moved = take_away(path)
    lock = path.with_name(path.name + "-lock")
    lock.unlink()
    send_signal(victim.pid, signal.SIGKILL)
    wait_for(lambda: up.log.read_text().count(GONE) >= 2, "the replacement refuses, and so does the supervisor")
    assert not path.exists()
    put_back(moved)
    fleet.wait_state(job, JobState.FAILED)
    [replacement] = up.wait_for_workers()
    assert replacement.id != victim.id


def _replace(url: str, tmp_path: Path) -> None:
    """Put another, empty ledger behind the same URL."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        take_away(path)
        ledger = open_ledger(Settings(url=f"sqlite:///{path.parent}/other.db"))
        ledger.migrate()
        ledger.close()
        (path.parent / "other.db").rename(path)
    else:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("alter schema unstuck rename to away")
        ledger = open_ledger(Settings(url=url))
        ledger.migrate()
        ledger.close()
        with psycopg.connect(url, autocommit=True) as db:
            # As a failover to a wrong server does.
            others = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
            db.execute(f"{others} and datname = current_database()")


def _bring_back(url: str) -> None:
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
            away = path.with_name(f"away-{path.name}{suffix}")
            if away.exists():
                away.rename(path.with_name(path.name + suffix))
    else:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("drop schema unstuck cascade; alter schema away rename to unstuck")
            others = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
            db.execute(f"{others} and datname = current_database()")


def test_nobody_mixes_two_ledgers_behind_one_url(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet()
    worker = fleet.start()
    job, _ = fleet.begin("nap", 2.0)
    _replace(fleet.url, tmp_path)
    wait_for(lambda: "another ledger" in worker.said(), "the worker says what happened")
    with pytest.raises(LedgerReplaced, match="another ledger"):
        fleet.ledger.jobs.count()
    fresh = open_ledger(Settings(url=fleet.url))
    assert (fresh.workers.list(), fresh.jobs.count()) == ([], {})
    fresh.close()
    _bring_back(fleet.url)
    fleet.wait_state(job, JobState.SUCCEEDED)


def test_a_copied_ledger_has_the_identity_of_its_origin(tmp_path: Path) -> None:
    url = ready_sqlite(tmp_path)
    ledger = open_ledger(Settings(url=url))
    (tmp_path / "two").mkdir()
    other = open_ledger(Settings(url=f"sqlite:///{tmp_path}/two/jobs.db"))
    other.migrate()
    assert len({ledger.ledger_id(), other.ledger_id()}) == 2
    ledger.close()
    other.close()
