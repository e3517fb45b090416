"""`unstuck up --dashboard`: the web door beside the workers, replaced when it dies, ended with them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from tests.fleet import ROOT, TASKS, wait_for


def door_of(supervisor: int) -> psutil.Process | None:
    try:
        children = psutil.Process(supervisor).children()
        return next((child for child in children if "serve" in child.cmdline()), None)
    except psutil.NoSuchProcess:
        return None


def answers(door: psutil.Process | None) -> str:
    """Give the address at which a web door answers, or nothing."""
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
    """Start workers with a web door beside them; give the supervisor and its log. All end with the block."""
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


def test_the_web_door_stands_beside_the_workers(tmp_path: Path) -> None:
    with up_beside(tmp_path, "--port", "0") as (up, log):
        wait_for(lambda: answers(door_of(up.pid)), "the web door to answer")
        first = door_of(up.pid)
        assert first is not None
        first.kill()
        wait_for(lambda: (door := door_of(up.pid)) and door.pid != first.pid and answers(door), "another web door")
        second = door_of(up.pid)
        assert second is not None
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0, log.read_text()
        assert not psutil.pid_exists(second.pid)


def test_workers_go_on_without_a_web_door_that_cannot_listen(tmp_path: Path) -> None:
    with up_beside(tmp_path, "--host", "203.0.113.1") as (up, log):
        wait_for(lambda: "Web door ended; starting it again" in log.read_text(), "the web door to fail")
        assert up.poll() is None
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0, log.read_text()
