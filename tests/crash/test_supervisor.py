"""`unstuck up`: its workers are killed, it is told to stop, it is killed itself."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import ROOT, TASKS, Fleet, wait_for
from tests.support.signals import OwnProcess, send_signal, signal_group

from unstuck.config import Settings
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.open import ready_ledger
from unstuck.worker.signals import TOGETHER_S
from unstuck.worker.supervised import BRAKE_AT, MAX_WAIT_S, STEADY_S, RestartBackoff


class Up:
    """One `unstuck up` in a session of its own, as under a terminal."""

    def __init__(self, fleet: Fleet, workers: int) -> None:
        self.fleet = fleet
        self.workers = workers
        self.log = fleet.folder / "up.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unstuck.cli.main", "up", TASKS, "--workers", str(workers)],
                cwd=ROOT,
                env={**os.environ, "UNSTUCK_URL": fleet.url, **fleet.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for_workers()

    def active(self) -> list[WorkerRecord]:
        return [worker for worker in self.fleet.ledger.workers.list() if worker.state is WorkerState.ACTIVE]

    def wait_for_workers(self) -> list[WorkerRecord]:
        def all_there() -> list[WorkerRecord]:
            assert self.process.poll() is None, self.log.read_text()
            found = self.active()
            return found if len(found) == self.workers else []

        return wait_for(all_there, f"{self.workers} supervised workers")

    def close(self) -> None:
        family = OwnProcess(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def started() -> Iterator[list[Up]]:
    ups: list[Up] = []
    yield ups
    for up in ups:
        up.close()


def start(started: list[Up], fleet: Fleet, workers: int = 1) -> Up:
    started.append(Up(fleet, workers))
    return started[-1]


def test_a_killed_worker_is_buried_by_its_supervisor_and_replaced(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    [victim] = up.active()
    fails, _ = fleet.begin("nap", 600.0)
    send_signal(victim.pid, signal.SIGKILL)
    fleet.wait_final(fails)
    record = fleet.ledger.jobs.get(fails.id)
    assert record is not None
    assert record.error is not None
    assert record.error.code == "WORKER_CRASHED"
    assert record.error.cause is not None
    saw = (
        r"its supervisor saw it end: killed by SIGKILL \(signal 9\) after \S+; "
        r"peak memory \d+ MB, CPU \S+ \(supervisor\)$"
    )
    assert re.search(saw, record.error.cause), record.error.cause
    dead = next(worker for worker in fleet.ledger.workers.list() if worker.id == victim.id)
    assert dead.verdict is not None
    assert (dead.verdict.detector, dead.verdict.by) == (Detector.SUPERVISOR, "supervisor")
    assert dead.verdict.autopsy is not None
    assert (dead.verdict.autopsy.signal, dead.verdict.autopsy.pid) == ("SIGKILL", victim.pid)
    [replacement] = up.wait_for_workers()
    assert replacement.id != victim.id
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_how_a_worker_ended_is_known_also_where_a_neighbour_saw_it_first(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    fleet.start("--queues", "other")
    [victim] = [worker for worker in up.active() if "other" not in worker.queues or len(worker.queues) > 1]
    send_signal(victim.pid, signal.SIGKILL)

    def explained() -> bool:
        dead = next(worker for worker in fleet.ledger.workers.list() if worker.id == victim.id)
        autopsy = None if dead.verdict is None else dead.verdict.autopsy
        return autopsy is not None and autopsy.signal == "SIGKILL" and (autopsy.max_memory_bytes or 0) > 1_000_000

    wait_for(explained, "the supervisor's word on how it ended")


def test_a_job_that_may_be_retried_is_finished_by_the_replacement(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    [victim] = up.active()
    job, _ = fleet.begin("nap_once_then_quick", 600.0)
    send_signal(victim.pid, signal.SIGKILL)
    job.result(timeout=30)
    assert fleet.state(job) is JobState.SUCCEEDED


def test_sigterm_drains_everybody_and_ends_in_order(make_fleet: MakeFleet, tmp_path: Path, started: list[Up]) -> None:
    fleet = make_fleet()
    up = start(started, fleet, workers=2)
    job, _ = fleet.begin("nap", 1.0)
    # Several may pass on the same wish, each in its own way: none of them means to hurry.
    for _ in range(3):
        up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log.read_text()
    assert fleet.state(job) is JobState.SUCCEEDED
    assert {worker.state for worker in fleet.ledger.workers.list()} == {WorkerState.STOPPED}
    assert "Received shutdown signal, gracefully exiting..." in up.log.read_text()


def test_ctrl_c_at_the_terminal_reaches_each_worker_once(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    job, _ = fleet.begin("nap", 1.5)
    # A terminal signals the whole foreground group; a worker that got it twice would hurry and kill the job.
    signal_group(up.process.pid, signal.SIGINT)
    assert up.process.wait(30) == 0, up.log.read_text()
    assert fleet.state(job) is JobState.SUCCEEDED


def test_a_second_signal_hurries(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    job, _ = fleet.begin("nap_again", 600.0)
    up.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "gracefully exiting" in up.log.read_text(), "the first signal heard")
    time.sleep(TOGETHER_S)  # Sooner it would be the same wish, passed on by somebody else.
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log.read_text()
    wait_for(lambda: fleet.state(job) is JobState.PENDING, "the job given back")
    record = fleet.ledger.jobs.get(job.id)
    assert record is not None
    assert record.crash_count == 0


def test_when_the_supervisor_is_killed_its_workers_drain(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet, workers=2)
    job, _ = fleet.begin("nap", 1.0)
    pids = [worker.pid for worker in up.active()]
    up.process.kill()
    up.process.wait(10)
    wait_for(
        lambda: {worker.state for worker in fleet.ledger.workers.list()} == {WorkerState.STOPPED},
        "both workers drained",
    )
    assert fleet.state(job) is JobState.SUCCEEDED, (fleet.ledger.jobs.get(job.id), up.log.read_text())
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "both processes gone")


SUPERVISE = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from unstuck import logs
    from unstuck.config import Recovery, Settings
    from unstuck.runner.oom import OomWatch
    from unstuck.ledger.open import ready_ledger
    from unstuck.worker import supervisor
    from unstuck.worker.supervisor import Supervisor

    logs.setup("info")
    supervisor.SILENT_S = float(os.environ.get("TEST_SILENT_S", supervisor.SILENT_S))
    if counter := os.environ.get("TEST_OOM_COUNTER"):
        supervisor.OomWatch = lambda shared: OomWatch(Path(counter))
    ledger = ready_ledger(Settings(url=sys.argv[1]))
    command = [sys.executable, "-c", sys.argv[4]]
    sys.exit(Supervisor(command, int(sys.argv[2]), ledger, Recovery(), stop_grace_s=float(sys.argv[3])).run())
    """
)


class Supervised:
    def __init__(self, folder: Path, command: str, workers: int, grace_s: float, more: dict[str, str]) -> None:
        self.log = folder / "supervisor.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, f"sqlite:///{folder}/jobs.db", str(workers), str(grace_s), command],
                cwd=ROOT,
                env={**os.environ, **more},
                stdout=file,
                stderr=subprocess.STDOUT,
            )


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator["Make"]:
    make = Make(tmp_path)
    yield make
    for made in make.made:
        made.process.kill()
        made.process.wait(10)


class Make:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Supervised] = []

    def __call__(self, command: str, *, workers: int = 1, grace_s: float = 20.0, **more: str) -> Supervised:
        self.made.append(Supervised(self.folder, command, workers, grace_s, more))
        return self.made[-1]


def test_workers_that_never_start_are_given_up_with_a_sentence(supervise: Make) -> None:
    up = supervise("raise SystemExit(3)", workers=2)
    assert up.process.wait(60) == 3
    said = up.log.read_text()
    assert "No worker stays up. Run the worker by hand to see why" in said
    assert "exited with code 3" in said
    # Alerts are made of this; each place says it once.
    ledger = ready_ledger(Settings(url=f"sqlite:///{supervise.folder}/jobs.db"))
    loops = [event.message for event in ledger.events.list() if event.kind == "crash_loop"]
    stillborn = [event.message for event in ledger.events.list() if event.kind == "worker_stillborn"]
    ledger.close()
    # Nobody registered, so no worker's page tells of it: each death is an event by itself.
    assert len(stillborn) == said.count("Worker process started")
    assert all("ended before it registered: exited with code 3" in message for message in stillborn)
    assert len(loops) == 2
    assert all(f"died {BRAKE_AT} times in a row" in message for message in loops)


def test_workers_that_ended_in_order_are_not_replaced(supervise: Make) -> None:
    up = supervise("raise SystemExit(0)", workers=2)
    assert up.process.wait(60) == 0
    assert up.log.read_text().count("Worker process started") == 2


def test_who_does_not_listen_is_killed_after_the_grace(supervise: Make, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    up = supervise(
        "import signal, pathlib, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(600)",
        grace_s=0.3,
    )
    wait_for(ready.exists, "the stubborn one started")
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(20) == 1
    assert "did not end in time" in up.log.read_text()


def test_what_a_dead_worker_left_behind_is_killed(supervise: Make, tmp_path: Path) -> None:
    note = tmp_path / "orphan"
    up = supervise(
        "import os, pathlib, subprocess, time; "
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    wait_for(lambda: note.exists() and note.read_text(), "an orphan to be")
    orphan = OwnProcess(int(note.read_text()))
    [worker] = [child for child in OwnProcess(up.process.pid).children() if child.pid != orphan.pid]
    worker.kill()
    wait_for(lambda: not orphan.is_running(), "the orphan gone")
    assert "killed by SIGKILL" in up.log.read_text()


def test_a_worker_that_hangs_as_a_whole_is_killed_for_its_silence(supervise: Make) -> None:
    up = supervise(
        "import time; from unstuck.worker.sd_notify import take_sd_notifier; "
        "take_sd_notifier().ready(); time.sleep(600)",
        TEST_SILENT_S="0.5",
    )
    wait_for(lambda: "Worker process died" in up.log.read_text(), "the end of the silent one")
    said = up.log.read_text()
    assert "A worker process hangs and is killed" in said
    assert "without any sign of life; peak memory" in said


def test_a_worker_killed_as_the_counter_of_the_kernel_rose_probably_ran_out_of_memory(
    supervise: Make, tmp_path: Path
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    up = supervise(
        f"import os, pathlib; pathlib.Path({str(counter)!r}).write_text('oom_kill 5\\n'); os.kill(os.getpid(), 9)",
        TEST_OOM_COUNTER=str(counter),
    )
    wait_for(lambda: up.log.read_text().count("Worker process died") >= 2, "two deaths")
    first, second = [line for line in up.log.read_text().splitlines() if "Worker process died" in line][:2]
    assert "probably the kernel, for want of memory" in first
    # One kill of the kernel explains one death.
    assert "want of memory" not in second


def test_a_worker_born_into_a_dead_house_does_not_start(tmp_path: Path) -> None:
    from unstuck.worker.supervised import LEASH

    nobody = str(os.getpid() + 1)
    command = [sys.executable, "-I", "-S", "-c", LEASH, nobody, sys.executable, "-c", "print('alive')"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (143, b"")


def test_replacements_come_at_once_then_ever_more_slowly() -> None:
    place, now_s, waits_s = RestartBackoff(), 1000.0, []
    for _ in range(12):
        waits_s.append(place.after_death(now_s, lived_s=0.1, code=-signal.SIGKILL))
        now_s = place.at_s
    assert waits_s[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits_s[-1] == MAX_WAIT_S
    assert waits_s == sorted(waits_s)
    assert place.braked
    # Killed from outside, not failing by itself: it may come right again.
    assert not place.hopeless
    assert place.after_death(now_s, lived_s=STEADY_S, code=1) == 0.0
    assert not place.braked


def test_a_place_is_hopeless_only_if_nothing_ever_stood_there() -> None:
    never, once = RestartBackoff(), RestartBackoff()
    once.after_death(0.0, lived_s=STEADY_S + 1, code=1)
    for _ in range(BRAKE_AT + 1):
        never.after_death(0.0, lived_s=0.1, code=1)
        once.after_death(0.0, lived_s=0.1, code=1)
    assert never.hopeless
    assert not once.hopeless


def door_of(supervisor: int) -> OwnProcess | None:
    try:
        children = OwnProcess(supervisor).children()
        return next((child for child in children if "serve" in child.cmdline()), None)
    except psutil.NoSuchProcess:
        return None


def answers(door: OwnProcess | None) -> str:
    """Give the address at which an HTTP server answers, or nothing."""
    if door is None:
        return ""
    try:
        ports = [seen.laddr.port for seen in door.net_connections("tcp") if seen.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return ""
    for port in ports:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200:
                return f"http://127.0.0.1:{port}"
        except httpx.HTTPError:
            pass
    return ""


@contextmanager
def up_beside(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start workers with an HTTP server beside them; give the supervisor and its log. All end with the block."""
    log = folder / "up.log"
    with log.open("wb") as file:
        up = subprocess.Popen(
            [sys.executable, "-m", "unstuck.cli.main", "up", TASKS, "--dashboard", *arguments],
            cwd=ROOT,
            env={**os.environ, "UNSTUCK_URL": f"sqlite:///{folder}/jobs.db"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield up, log
    finally:
        if up.poll() is None:
            up.kill()
            up.wait()


def test_the_http_server_stands_beside_the_workers(tmp_path: Path) -> None:
    with up_beside(tmp_path, "--port", "0") as (up, log):
        wait_for(lambda: answers(door_of(up.pid)), "the HTTP server to answer")
        first = door_of(up.pid)
        assert first is not None
        first.kill()
        wait_for(lambda: (door := door_of(up.pid)) and door.pid != first.pid and answers(door), "another HTTP server")
        second = door_of(up.pid)
        assert second is not None
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0, log.read_text()
        assert not psutil.pid_exists(second.pid)


def test_workers_go_on_without_an_http_server_that_cannot_listen(tmp_path: Path) -> None:
    with up_beside(tmp_path, "--host", "203.0.113.1") as (up, log):
        wait_for(lambda: "HTTP server ended; starting it again" in log.read_text(), "the HTTP server to fail")
        assert up.poll() is None
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0, log.read_text()
