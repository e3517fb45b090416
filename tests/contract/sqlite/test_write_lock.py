"""The write lock of the SQLite ledger: fair, named, and taken from the frozen and the dead."""

import gc
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from tests.support.builders import new_job, put
from tests.support.fleet import TIMEOUT_S, wait_for

from unstuck import host
from unstuck.config import Recovery, Settings
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract.jobs import Enqueued, NewJob
from unstuck.ledger.sqlite import jobs
from unstuck.ledger.sqlite.enqueue import insert_jobs
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.lock import FairLock, Holder, Turnstile, Watch, read_holder

SETTINGS = {"recovery": Recovery(heartbeat_interval="500ms", heartbeat_timeout="2s")}

ENQUEUE = """
import sys
from unstuck.config import Settings
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.sqlite.ledger import SqliteLedger
print(SqliteLedger(Settings(url=sys.argv[1])).jobs.enqueue([NewJob("add", "default", b"from another process")]))
"""

HAMMER = """
import os, sys
from unstuck.config import Settings
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.sqlite.ledger import SqliteLedger
ledger = SqliteLedger(Settings(url=sys.argv[1]))
ledger.jobs.count()
print("ready", flush=True)
sys.stdin.readline()
while not os.path.exists(sys.argv[3]):
    ledger.jobs.enqueue([NewJob("add", "default", sys.argv[2].encode() * 2000)] * 20)
"""
BATCHES = 40


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def ledger(url: str) -> SqliteLedger:
    ledger = SqliteLedger(Settings(url=url, **SETTINGS))
    ledger.migrate()
    return ledger


def elsewhere(script: str, url: str, *arguments: str, failpoints: str = "") -> "subprocess.Popen[str]":
    environment = {**os.environ, "UNSTUCK_FAILPOINTS": failpoints}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script, url, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )


def soon_s() -> float:
    """Return the deadline of a wait that ends at once on any machine."""
    return time.monotonic() + TIMEOUT_S


def stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat[stat.rindex(")") + 2] == "T"


@pytest.mark.parametrize("point", ["sqlite.inside_write", "enqueue.before_commit"])
def test_a_process_killed_inside_its_write_holds_up_nobody(ledger: SqliteLedger, url: str, point: str) -> None:
    victim = elsewhere(ENQUEUE, url, failpoints=f"{point}=kill")
    victim.communicate(timeout=30)
    assert victim.returncode == -signal.SIGKILL
    # If it waited for the lock, it would give up.
    put(ledger)
    assert ledger.jobs.count() == {"pending": 1}


def test_a_process_killed_after_its_commit_has_written(ledger: SqliteLedger, url: str) -> None:
    victim = elsewhere(ENQUEUE, url, failpoints="enqueue.after_commit=kill")
    victim.communicate(timeout=30)
    assert victim.returncode == -signal.SIGKILL
    assert ledger.jobs.count() == {"pending": 1}


def test_a_process_frozen_inside_its_write_is_killed_and_the_others_go_on(
    ledger: SqliteLedger, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = elsewhere(ENQUEUE, url, failpoints="sqlite.inside_write=stop")
    wait_for(lambda: stopped(frozen.pid), "the freeze")
    before = time.monotonic()
    # Reading goes on all the while.
    assert ledger.jobs.count() == {}
    put(ledger)
    waited_s = time.monotonic() - before
    frozen.communicate(timeout=30)
    assert frozen.returncode == -signal.SIGKILL
    # Half of the heartbeat timeout, and not less.
    assert waited_s > 0.8
    assert ledger.jobs.count() == {"pending": 1}
    assert f"Process {frozen.pid} was frozen inside a write" in caplog.text


def test_two_busy_processes_take_turns(ledger: SqliteLedger, url: str, tmp_path: Path) -> None:
    over = tmp_path / "over"
    processes = [elsewhere(HAMMER, url, name, str(over)) for name in "ab"]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    wait_for(lambda: all(_writers(tmp_path).count(name) >= BATCHES for name in "ab"), "both to have written often")
    over.touch()
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    turns = [len(list(same)) for _, same in itertools.groupby(_writers(tmp_path).strip("a").strip("b"))]
    # A process that gets no processor lets the other one write meanwhile: that makes some long turns, not most.
    assert statistics.median(turns) <= 2, turns
    assert ledger.jobs.count() == {"pending": 20 * len(_writers(tmp_path))}


def _writers(folder: Path) -> str:
    """Return who wrote each batch, in the order of the commits."""
    with closing(apsw.Connection(str(folder / "jobs.db"))) as connection:
        payloads = [
            bytes(row[0])[:1].decode() for row in connection.execute("SELECT payload FROM unstuck_jobs ORDER BY id")
        ]
    return "".join(payloads[::20])


def test_threads_pass_in_the_order_in_which_they_came() -> None:
    turnstile = Turnstile()
    assert turnstile.acquire(0)
    order: list[int] = []
    threads = []
    for number in range(5):

        def go(number: int = number) -> None:
            assert turnstile.acquire(30)
            order.append(number)
            turnstile.release()

        threads.append(threading.Thread(target=go))
        threads[-1].start()
        wait_for(lambda number=number: len(turnstile._line) == number + 1, "a place in line")
    turnstile.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_a_thread_that_gave_up_does_not_stop_the_line() -> None:
    turnstile = Turnstile()
    assert turnstile.acquire(0)
    assert not turnstile.acquire(0.01)
    turnstile.release()
    assert turnstile.acquire(0)


def test_a_waiter_that_gave_up_leaves_the_lock_to_others(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    path = tmp_path / "a.db-lock"
    holder, waiter = FairLock(path, 100.0), FairLock(path, 100.0)
    holder.acquire(soon_s())
    with pytest.raises(LedgerUnavailable, match="locked by someone else"):
        waiter.acquire(time.monotonic() + 0.15)
    holder.release()
    # The helper that waited on may get the lock for a moment, and must give it back.
    for _ in range(20):
        holder.acquire(soon_s())
        holder.release()
        waiter.acquire(soon_s())
        waiter.release()


def test_the_lock_file_names_its_holder_only_while_it_is_held(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    lock = FairLock(tmp_path / "a.db-lock", 1.0)
    lock.acquire(soon_s())
    fd = os.open(lock.path, os.O_RDONLY)
    held = read_holder(fd)
    lock.release()
    assert held is not None
    assert (held.pid, held.started) == (os.getpid(), host.process_started(os.getpid()))
    assert read_holder(fd) is None
    os.close(fd)


@pytest.fixture
def bystander() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(["sleep", "60"])
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()


def watched(holder: Holder, seconds: float) -> bool:
    """Watch a holder that never moves for so long, without waiting."""
    watch = Watch(kill_after_s=1.0, tick_s=0.1)
    killed = False
    for _ in range(int(seconds / 0.4) + 2):
        watch._last_boot_s -= 0.4
        killed = watch.tick(holder, "a.db-lock") or killed
    return killed


def test_only_the_very_process_that_took_the_lock_is_killed(bystander: "subprocess.Popen[bytes]") -> None:
    namespace = host.pid_namespace()
    started = host.process_started(bystander.pid)
    assert not watched(Holder(bystander.pid, "1", 1, 0.0, 0.0, namespace), 60)
    assert not watched(Holder(bystander.pid, started, 1, 0.0, 0.0, "pid:[1]"), 60)
    assert not watched(Holder(os.getpid(), host.process_started(os.getpid()), 1, 0.0, 0.0, namespace), 60)
    assert bystander.poll() is None
    assert watched(Holder(bystander.pid, started, 1, 0.0, 0.0, namespace), 60)
    assert bystander.wait(10) == -signal.SIGKILL


def test_a_holder_that_is_only_slow_is_given_more_time_than_one_that_is_stopped(
    bystander: "subprocess.Popen[bytes]",
) -> None:
    holder = Holder(bystander.pid, host.process_started(bystander.pid), 1, 0.0, 0.0, host.pid_namespace())
    assert not watched(holder, 5)
    bystander.send_signal(signal.SIGSTOP)
    wait_for(lambda: stopped(bystander.pid), "the bystander to be stopped")
    assert watched(holder, 5)


def test_a_holder_that_announced_long_work_is_given_the_time(bystander: "subprocess.Popen[bytes]") -> None:
    holder = Holder(bystander.pid, host.process_started(bystander.pid), 1, 0.0, 600.0, host.pid_namespace())
    assert not watched(holder, 500)
    assert watched(holder, 700)


def test_a_holder_that_changes_is_not_frozen(bystander: "subprocess.Popen[bytes]") -> None:
    watch = Watch(kill_after_s=1.0, tick_s=0.1)
    started = host.process_started(bystander.pid)
    for number in range(50):
        watch._last_boot_s -= 0.4
        assert not watch.tick(Holder(bystander.pid, started, number, 0.0, 0.0, host.pid_namespace()), "a.db-lock")
    assert bystander.poll() is None


def test_a_waiter_that_was_frozen_itself_accuses_nobody(bystander: "subprocess.Popen[bytes]") -> None:
    watch = Watch(kill_after_s=1.0, tick_s=0.1)
    holder = Holder(bystander.pid, host.process_started(bystander.pid), 1, 0.0, 0.0, host.pid_namespace())
    assert not watch.tick(holder, "a.db-lock")
    watch._last_boot_s -= 3600
    assert not watch.tick(holder, "a.db-lock")
    assert bystander.poll() is None


def test_a_large_enqueue_says_how_long_it_may_need(
    ledger: SqliteLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Holder | None] = []

    def look_and_insert(cursor: apsw.Cursor, jobs: Sequence[NewJob]) -> list[Enqueued]:
        fd = os.open(tmp_path / "jobs.db-lock", os.O_RDONLY)
        seen.append(read_holder(fd))
        os.close(fd)
        return insert_jobs(cursor, jobs)

    monkeypatch.setattr(jobs, "insert_jobs", look_and_insert)
    ledger.jobs.enqueue([new_job()] * 20_000)
    [holder] = seen
    assert holder is not None
    assert (holder.pid, holder.limit_s) == (os.getpid(), 20.0)


def test_an_operators_long_list_is_worked_off_in_short_steps(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STEP_JOBS", 2)
    ids = [job.job_id for job in ledger.jobs.enqueue([new_job()] * 5)]
    commits_before = _commits(ledger)
    assert ledger.jobs.cancel([*ids, 99, ids[0]], "me") == {**dict.fromkeys(ids, "cancelled"), 99: "missing"}
    assert _commits(ledger) - commits_before >= 3
    assert ledger.jobs.retry(ids, "me") == dict.fromkeys(ids, "queued")


def _commits(ledger: SqliteLedger) -> int:
    return ledger.db.lock._number


def test_all_meet_at_the_new_lock_file_when_the_old_one_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").touch()
    path = tmp_path / "jobs.db-lock"
    old, new = FairLock(path, 5.0), FairLock(path, 5.0)
    old.acquire(soon_s())
    path.unlink()
    new.acquire(soon_s())
    old.release()
    with pytest.raises(LedgerUnavailable):
        old.acquire(time.monotonic() + 0.2)
    new.release()
    wait_for(lambda: not old._blocked, "nobody waits for the lock any more")
    old.acquire(soon_s())
    old.release()
    old.close()
    new.close()


def test_a_ledger_that_is_dropped_keeps_no_file_open(url: str, tmp_path: Path) -> None:
    def open_files() -> list[str]:
        names = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return [name for name in names if name.startswith(str(tmp_path))]

    ledger = SqliteLedger(Settings(url=url))
    ledger.migrate()
    assert f"{tmp_path}/jobs.db-lock" in open_files()
    del ledger
    gc.collect()
    assert open_files() == []
