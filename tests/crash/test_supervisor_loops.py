"""The supervisor with commands that misbehave: crash loops, stubborn ones, and what they leave behind."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.fleet import ROOT, wait_for

from unstuck.config import Settings
from unstuck.store.opening import ready_ledger
from unstuck.worker.replacing import BRAKE_AT, MAX_WAIT_S, STEADY_S, Replacing

SUPERVISE = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from unstuck import logs
    from unstuck.config import Recovery, Settings
    from unstuck.runner.oom import OomWatch
    from unstuck.store.opening import ready_ledger
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
    loops = [event.message for event in ledger.events() if event.kind == "crash_loop"]
    stillborn = [event.message for event in ledger.events() if event.kind == "worker_stillborn"]
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
    orphan = psutil.Process(int(note.read_text()))
    [worker] = [child for child in psutil.Process(up.process.pid).children() if child.pid != orphan.pid]
    worker.kill()
    wait_for(lambda: not orphan.is_running(), "the orphan gone")
    assert "killed by SIGKILL" in up.log.read_text()


def test_a_worker_that_hangs_as_a_whole_is_killed_for_its_silence(supervise: Make) -> None:
    up = supervise(
        "import time; from unstuck.worker.herald import take_herald; take_herald().ready(); time.sleep(600)",
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
    from unstuck.worker.places import LEASH

    nobody = str(os.getpid() + 1)
    command = [sys.executable, "-I", "-S", "-c", LEASH, nobody, sys.executable, "-c", "print('alive')"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (143, b"")


def test_replacements_come_at_once_then_ever_more_slowly() -> None:
    place, now_s, waits_s = Replacing(), 1000.0, []
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
    never, once = Replacing(), Replacing()
    once.after_death(0.0, lived_s=STEADY_S + 1, code=1)
    for _ in range(BRAKE_AT + 1):
        never.after_death(0.0, lived_s=0.1, code=1)
        once.after_death(0.0, lived_s=0.1, code=1)
    assert never.hopeless
    assert not once.hopeless
