"""Fixtures of the crash tests: a ledger of each kind, a fleet of real workers on it, and a place with little memory."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import run_guard
from tests.support.fleet import Fleet, WorkerProcess, wait_for
from tests.support.hosts import Host
from tests.support.sqlite import ready_sqlite

from unstuck.runner import cgroups

MakeFleet = Callable[..., Fleet]

CGROUP_MB = 320


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty ledger: each test that asks runs on both databases.

    To make the tables is the same work every time, and shown elsewhere: a fleet finds them there."""
    ready = "make_fleet" in request.fixturenames and "untouched" not in request.fixturenames
    if request.param == "sqlite":
        return ready_sqlite(tmp_path) if ready else f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("ready_pg_url" if ready else "pg_url"))


@pytest.fixture
def make_fleet(url: str, tmp_path: Path) -> Iterator[MakeFleet]:
    """Make fleets with settings of their own; all their processes end with the test."""
    made: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        made.append(Fleet(settings.pop("url", url), tmp_path, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """A fleet with default settings."""
    return make_fleet()


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1 below our own, with little memory."""
    own = cgroups.own("memory")
    if own is None or os.geteuid():
        pytest.skip("needs root and the version 1 tree of the memory controller")
    group = own / f"unstuck-test-{os.getpid()}-{time.monotonic_ns()}"
    if not cgroups.make_cgroup(group):
        pytest.skip(f"{own} may not be divided")
    run_guard.note(group)
    (group / "memory.limit_in_bytes").write_text(str(CGROUP_MB << 20))
    yield group
    wait_for(lambda: cgroups.remove_cgroup(group), "the cgroup to be empty")


def started_in(group: Path, fleet: Fleet) -> WorkerProcess:
    return fleet.start("--concurrency", "2", place=Host(cgroup=str(group)), prepare_fork_server=False)
