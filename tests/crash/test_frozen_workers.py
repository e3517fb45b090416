"""A process is frozen at the wrong moment and wakes late."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.backdoor import SqliteBackdoor, age
from tests.support.fleet import (
    LEASE_S,
    PROMPT,
    SCALED,
    SEEN_FIRST,
    TIMEOUT_S,
    Fleet,
    assert_one_attempt_each,
    begin,
    begin_on_each,
    wait_for,
    wait_heartbeats,
)
from tests.support.hosts import Host, needs_other_boots, needs_other_hosts
from tests.support.network_proxy import Proxy
from tests.support.signals import OwnProcess, send_signal
from tests.support.sqlite import ready_sqlite

from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState

pytestmark = pytest.mark.both_databases

TIGHT = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "2s", "check_interval": "0.25s", "evidence": "none"}


def test_a_frozen_worker_wakes_late_and_its_result_is_refused(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**TIGHT)
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    notes = tmp_path / "notes"
    job = fleet.task("nap_once_then_quick").enqueue(3.0, str(notes))
    wait_for(notes.exists, "the first attempt to begin")
    runners = [process.pid for process in frozen.runners()]
    frozen.freeze()
    fleet.start("--concurrency", "1")
    assert job.result(timeout=30) == "quick"
    frozen.signal_family(signal.SIGCONT)

    def reborn() -> bool:
        record = frozen.record()
        return record is not None and record.id != frozen_id and record.state is WorkerState.ACTIVE

    wait_for(reborn, "the thawed worker to come back under a new id")
    wait_for(lambda: not any(_alive(pid) for pid in runners), "its old runners to be killed")
    assert fleet.state(job) is JobState.SUCCEEDED
    attempts = fleet.ledger.jobs.attempts(job.id)
    assert [attempt.state for attempt in attempts].count(AttemptState.SUCCEEDED) == 1
    assert attempts[0].worker_id == frozen_id
    assert attempts[0].state is AttemptState.CRASHED
    old = next(worker for worker in fleet.ledger.workers.list() if worker.id == frozen_id)
    assert old.state is WorkerState.DEAD
    # The one that came back works like any other.
    fleet.workers[-1].stop()
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_only_the_worker_is_frozen_and_the_fork_server_ends_its_runners(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**TIGHT)
    frozen = fleet.start("--concurrency", "1")
    notes = tmp_path / "notes"
    job = fleet.task("nap_once_then_quick").enqueue(60.0, str(notes))
    wait_for(notes.exists, "the first attempt to begin")
    runner = frozen.runners()[0]
    frozen.freeze(alone=True)
    fleet.start("--concurrency", "1")
    assert job.result(timeout=30) == "quick"
    # Its lease ended before the job was given away, and the fork server saw to it.
    assert not _alive(runner.pid)
    send_signal(frozen.pid, signal.SIGCONT)


def test_a_worker_frozen_inside_a_write_does_not_stop_the_others(make_fleet: MakeFleet, url: str) -> None:
    point = "sqlite.inside_write=stop:5" if url.startswith("sqlite") else "turn.before_commit=stop:5"
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="4s", check_interval="0.25s")
    frozen = fleet.start(wait=False, UNSTUCK_FAILPOINTS=point)
    wait_for(lambda: _stopped(frozen.pid), "the worker to freeze inside its write")
    # Whoever writes next waits behind it for half the timeout at the most, then goes on without it.
    healthy = fleet.start(wait=False)
    job = fleet.task("add").enqueue(1, 2)
    assert job.result(timeout=60) == 3
    assert healthy.process.poll() is None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGSTOP], ids=["stop"])
def test_a_short_freeze_costs_nothing(fleet: Fleet, number: signal.Signals) -> None:
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 0.5)
    worker.signal_family(number)
    worker.signal_family(signal.SIGCONT)
    assert job.result(timeout=30) == "rested"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["all", "worker"])
def test_a_worker_that_was_frozen_itself_accuses_no_job_of_silence(
    make_fleet: MakeFleet, tmp_path: Path, whole: bool
) -> None:
    fleet = make_fleet(**PROMPT)
    worker = fleet.start("--concurrency", "2")
    over = tmp_path / "over"
    job = fleet.task("give_signs_until").enqueue(str(over))
    fleet.wait_running(job)
    wait_for(lambda: worker.runners(), "a runner")
    frozen = worker.family() if whole else worker.family()[:1]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # The frost itself, longer than a job may be silent.
    for process in reversed(frozen):
        process.send_signal(signal.SIGCONT)
    wait_heartbeats(fleet)
    over.touch()
    assert job.result(timeout=30) == "done"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


SLOW_HEARTBEATS = {"heartbeat_interval": "1s", "heartbeat_timeout": "2s", "check_interval": "0.25s"}
SHORT_CLAIMS = {
    "heartbeat_interval": "0.6s",
    "heartbeat_timeout": "3s",
    "claimed_stale_after": "1.2s",
    "check_interval": "0.25s",
}


@pytest.mark.parametrize("settings", [SLOW_HEARTBEATS, SHORT_CLAIMS], ids=["half-the-timeout", "short-claims"])
def test_a_frozen_worker_is_found_at_the_slowest_heartbeat_that_is_allowed(
    make_fleet: MakeFleet, settings: dict[str, str]
) -> None:
    fleet = make_fleet(**settings)
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    job, _ = begin(fleet, "nap_once_then_quick", 60.0, "notes")
    for _ in range(2):
        fleet.start("--concurrency", "1")
    frozen.freeze()
    assert job.result(timeout=TIMEOUT_S) == "quick"
    # With leases this short a healthy worker that gets no processor may be declared dead too.
    assert frozen_id in [worker.id for worker in fleet.ledger.workers.list() if worker.state == "dead"]
    first = fleet.ledger.jobs.attempts(job.id)[0]
    assert (first.worker_id, first.state) == (frozen_id, AttemptState.CRASHED)


@contextmanager
def _transaction(path: Path) -> Iterator[apsw.Connection]:
    """Hold the write lock, as a user's transaction does that takes its time."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    connection.execute("begin immediate")
    yield connection
    connection.execute("commit")
    connection.close()


@pytest.fixture
def locked_fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(ready_sqlite(tmp_path), tmp_path, **SCALED)
    yield fleet
    fleet.close()


@pytest.fixture
def sqlite_fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(ready_sqlite(tmp_path), tmp_path, **SEEN_FIRST)
    yield fleet
    fleet.close()


def test_transactions_that_keep_the_write_lock_longer_than_the_lease_kill_nobody(sqlite_fleet: Fleet) -> None:
    fleet = sqlite_fleet
    workers = [fleet.start("--concurrency", "1") for _ in range(3)]
    jobs, notes = begin_on_each(fleet, workers, "nap", 6.0)
    for longer_s in (60.0, 0.0, 0.0):
        with _transaction(fleet.folder / "jobs.db") as transaction:
            time.sleep(1.0)  # The transaction itself.
            age(SqliteBackdoor(fleet.folder / "jobs.db", transaction), longer_s)
    assert_one_attempt_each(fleet, jobs)
    assert notes.read_text().count("begun") == len(jobs)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_worker_frozen_beside_a_long_transaction_is_found_after_it(locked_fleet: Fleet, when: str) -> None:
    fleet = locked_fleet
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    job, _ = begin(fleet, "nap_once_then_quick", 60.0, "notes")
    fleet.start("--concurrency", "1")
    if when == "before":
        frozen.freeze()
    with _transaction(fleet.folder / "jobs.db"):
        time.sleep(LEASE_S / 2)  # The transaction itself, in two halves.
        frozen.signal_family(signal.SIGSTOP)
        time.sleep(LEASE_S / 2 + 1)
    assert job.result(timeout=TIMEOUT_S) == "quick"
    # With a lease this short a healthy worker that gets no processor may be declared dead too.
    assert frozen_id in [worker.id for worker in fleet.ledger.workers.list() if worker.state == "dead"]


@needs_other_boots
def test_two_containers_with_boot_ids_of_their_own_share_a_file_in_peace(sqlite_fleet: Fleet) -> None:
    fleet = sqlite_fleet
    workers = [
        fleet.start("--concurrency", "1", place=Host(boot_id=boot_id))
        for boot_id in ("", "b7f4a1c0-0000-4000-8000-000000000001")
    ]
    jobs, _ = begin_on_each(fleet, workers, "nap", 2.0)
    assert_one_attempt_each(fleet, jobs)


@needs_other_hosts
def test_a_worker_killed_on_another_host_is_seen_by_its_session_long_before_its_lease(
    ready_pg_url: str, tmp_path: Path
) -> None:
    """What makes session evidence worth having must survive the caution that it is taken with."""
    fleet = Fleet(ready_pg_url, tmp_path, **PROMPT)
    try:
        victim = fleet.start("--concurrency", "1", place=Host(host="far"))
        job, _ = begin(fleet, "nap_once_then_quick", 60.0, "notes")
        fleet.start("--concurrency", "1", place=Host(host="near"))
        victim.kill_family()
        assert job.result(timeout=TIMEOUT_S) == "quick"
        [dead] = [worker for worker in fleet.ledger.workers.list() if worker.state is WorkerState.DEAD]
        assert dead.verdict is not None
        assert dead.verdict.detector is Detector.SESSION
    finally:
        fleet.close()


SETTINGS = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "3s", "check_interval": "0.25s", "evidence": "none"}


@pytest.fixture
def proxy(ready_pg_url: str) -> Iterator[Proxy]:
    with Proxy(ready_pg_url) as made:
        yield made


def test_a_worker_cut_off_stops_its_job_before_somebody_else_begins_it(
    ready_pg_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    fleet = Fleet(ready_pg_url, tmp_path, **SETTINGS)
    try:
        far = fleet.start("--concurrency", "1", UNSTUCK_URL=proxy.url)
        far_id = far.id
        notes = tmp_path / "notes"
        job = fleet.task("nap_once_then_quick").enqueue(60.0, str(notes))
        wait_for(lambda: notes.exists() and "\n" in notes.read_text(), "the first attempt to begin")
        first_runner = OwnProcess(int(notes.read_text().split()[1]))
        fleet.start("--concurrency", "1")
        proxy.cut()
        wait_for(lambda: notes.read_text().count("begun") == 2, "the second attempt to begin")
        # The second attempt has only just begun: the first must be gone already.
        assert not first_runner.is_running() or first_runner.status() == psutil.STATUS_ZOMBIE
        assert job.result(timeout=30) == "quick"
        record = next(worker for worker in fleet.ledger.workers.list() if worker.id == far_id)
        assert record.state is WorkerState.DEAD
        assert record.verdict is not None
        assert record.verdict.detector is Detector.LEASE
        proxy.heal()
        wait_for(lambda: (r := far.record()) is not None and r.id != far_id, "the lost worker to come back")
        assert fleet.state(job) is JobState.SUCCEEDED
        states = [attempt.state for attempt in fleet.ledger.jobs.attempts(job.id)]
        assert states.count(AttemptState.SUCCEEDED) == 1
    finally:
        fleet.close()


def test_a_short_cut_costs_nothing(ready_pg_url: str, proxy: Proxy, tmp_path: Path) -> None:
    fleet = Fleet(ready_pg_url, tmp_path)
    try:
        far = fleet.start("--concurrency", "2", UNSTUCK_URL=proxy.url)
        fleet.start("--queues", "other")
        jobs = [fleet.begin("nap", 4)[0], fleet.begin("nap_again", 4)[0]]
        proxy.cut()
        wait_for(lambda: far.record().silent_s > 6, "a beat to be missed")  # type: ignore[union-attr]
        proxy.heal()
        for job in jobs:
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
    finally:
        fleet.close()
