"""What end-to-end trials share: several hosts, a clock that can be stepped, and what must hold in every trial."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.elsewhere import Place, can_enter
from tests.fleet import Fleet, WorkerProcess, wait_for
from tests.pg import PgServer, prepare_postgres

from unstuck.client.job import Job
from unstuck.domain.errors import LedgerUnavailable
from unstuck.domain.states import FINAL, WorkerState

FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")
needs_faketime = pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
needs_other_hosts = pytest.mark.skipif(
    not can_enter(Place(host="elsewhere")), reason="may not give a process another host name (root, Linux)"
)
needs_other_boots = pytest.mark.skipif(
    not can_enter(Place(boot_id="another")), reason="may not give a process another boot id (root, Linux)"
)

SCALED = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "4s", "check_interval": "0.25s", "session_grace": "0.5s"}
"""The default settings, about eight times as fast."""
LEASE_S = 4.0


class Clock:
    """The wall clock of processes that start with `environment`; clocks that only measure time go on as always."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._file.touch(0o644)
        self.step_to(0)
        self.environment = {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step_to(self, off_s: float) -> None:
        """Let the clock differ by this much from the true time, from now on."""
        self.off_s = off_s
        new = self._file.with_suffix(".new")
        new.write_text(f"{off_s:+f}s\n")
        new.chmod(0o644)
        new.rename(self._file)


@contextmanager
def start_with_clock() -> Iterator[tuple[PgServer, Clock]]:
    """Run a server whose clock can be stepped."""
    with prepare_postgres() as server:
        clock = Clock(server.folder / "clock")
        server.environment = clock.environment
        server.start()
        yield server, clock


def the_dead(fleet: Fleet) -> list[str]:
    """Return each worker that was declared dead, with the verdict."""
    return [f"{one.name}: {one.verdict}" for one in fleet.ledger.workers() if one.state is WorkerState.DEAD]


def nobody_died(fleet: Fleet) -> None:
    dead = the_dead(fleet)
    assert not dead, f"declared dead although alive: {dead}"


def rested_at_once(fleet: Fleet, jobs: list[Job], patience_s: float = 40.0) -> None:
    """Wait for the naps; check that each needed one attempt, and that nobody was declared dead meanwhile."""

    def all_ended() -> bool:
        # Whoever asks while the server is away gets no answer: it is asked again.
        with suppress(LedgerUnavailable):
            nobody_died(fleet)
            return all(fleet.state(job) in FINAL for job in jobs)
        return False

    wait_for(all_ended, "every nap to end", patience_s, every_s=0.05)
    for job in jobs:
        assert job.result(timeout=5) == "rested"
        assert len(fleet.ledger.attempts(job.id)) == 1, fleet.ledger.attempts(job.id)
    nobody_died(fleet)


def begin(fleet: Fleet, task: str, seconds: float, name: str) -> tuple[Job, Path]:
    """Enqueue a nap and wait until its code has begun; return the job and the file that it writes its notes to."""
    notes = fleet.folder / name
    job = fleet.task(task).enqueue(seconds, str(notes))
    wait_for(lambda: notes.exists() and "begun" in notes.read_text(), f"{task} to begin")
    return job, notes


def begin_on_each(fleet: Fleet, workers: list[WorkerProcess], task: str, seconds: float) -> tuple[list[Job], Path]:
    """Let every worker begin one nap; return the jobs and the file that all of them write their notes to."""
    notes = fleet.folder / f"{task}.notes"
    jobs = [fleet.task(task).enqueue(seconds, str(notes)) for _ in workers]
    wait_for(lambda: notes.exists() and notes.read_text().count("begun") == len(workers), "every nap to begin")
    holders = {fleet.ledger.attempts(job.id)[0].worker_id for job in jobs}
    assert len(holders) == len(workers), "one job each"
    return jobs, notes


def overlap_s(notes: Path) -> float:
    """Return for how long the first two attempts of `tick_once_then_quick` ran at the same time."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    pids = list(dict.fromkeys(pid for _, pid, _ in lines))
    assert len(pids) >= 2, f"there was one attempt only: {lines[:1]}"
    last_of_first = max(float(at) for _, pid, at in lines if pid == pids[0])
    begin_of_second = min(float(at) for _, pid, at in lines if pid == pids[1])
    return last_of_first - begin_of_second
