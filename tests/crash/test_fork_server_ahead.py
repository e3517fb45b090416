"""A fork server that a test forked ahead of time is like one that its worker started."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, WorkerProcess, wait_for
from tests.support.signals import OwnProcess

from unstuck.runner.containment import MARK_VARIABLE

STATUS = ("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Umask", "Threads", "CapEff", "Name")
PLAIN = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


def facts(worker: WorkerProcess) -> dict[str, Any]:
    """Return what the kernel knows of the worker's fork server, without numbers that differ each time."""
    fork_server = worker.family()[1]
    here = Path(f"/proc/{fork_server.pid}")
    environment = [word.decode() for word in (here / "environ").read_bytes().split(b"\0") if word]
    status = dict(line.split(":\t") for line in (here / "status").read_text().splitlines() if ":\t" in line)
    shown = dict(word.split("=", 1) for word in environment)
    assert re.fullmatch(r"\S+", shown.pop(MARK_VARIABLE))
    return {
        "parent": fork_server.ppid() == worker.pid,
        "leads its session": os.getsid(fork_server.pid) == fork_server.pid == os.getpgid(fork_server.pid),
        "environment": shown,
        "stdin": os.readlink(here / "fd" / "0"),
        "descriptors": sorted(re.sub(r"(?<=unstuck-)\w+|\d+", "", os.readlink(one)) for one in (here / "fd").iterdir()),
        "directory": os.readlink(here / "cwd"),
        "limits": (here / "limits").read_text(),
        "oom": (here / "oom_score_adj").read_text(),
        **{name: status[name] for name in STATUS if name in status},
    }


@PLAIN
def test_it_is_as_if_the_worker_had_started_it(fleet: Fleet) -> None:
    plain, ahead = (fleet.start("--concurrency", "1", prepare_fork_server=one) for one in (False, True))
    assert b"runner.fork_server" in Path(f"/proc/{plain.family()[1].pid}/cmdline").read_bytes()
    assert b"runner.fork_server" not in Path(f"/proc/{ahead.family()[1].pid}/cmdline").read_bytes()
    assert facts(ahead) == facts(plain)


@PLAIN
def test_the_next_one_starts_the_plain_way(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "1")
    first = worker.family()[1]
    first.kill()
    wait_for(lambda: any(b"runner.fork_server" in cmdline(one) for one in worker.family()[1:]), "the next fork server")
    assert fleet.task("add").enqueue(1, 2).result(timeout=60) == 3


@PLAIN
def test_it_ends_with_a_worker_that_never_used_it(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet()
    worker = fleet.start(wait=False)
    worker.process.send_signal(signal.SIGSTOP)
    idle = worker.family()[1:]
    worker.process.kill()
    worker.process.wait(10)
    wait_for(lambda: not any(one.is_running() for one in idle), "the fork server to end")


def cmdline(process: OwnProcess) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""
