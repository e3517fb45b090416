"""Supervisors and reapers serve metrics of their own, each process on its own port."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.fleet import ROOT, TASKS, wait_for

from unstuck.config import Settings
from unstuck.ledger.open import ready_ledger

PATIENCE_S = 60.0


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Path]:
    """Run a command until the block ends, and give its log."""
    url = f"sqlite:///{folder}/jobs.db"
    ready_ledger(Settings(url=url)).close()
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "unstuck.cli.main", *arguments],
            cwd=ROOT,
            env={**os.environ, "UNSTUCK_URL": url},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [(("up", TASKS, "--workers", "2", "--metrics-port", "0"), 3), (("reaper", "--metrics-port", "0"), 1)],
)
def test_each_process_serves_its_own(tmp_path: Path, arguments: tuple[str, ...], processes: int) -> None:
    with running(tmp_path, *arguments) as log:

        def addresses() -> set[str] | None:
            found = set(re.findall(r"http://127\.0\.0\.1:\d+/metrics", log.read_text()))
            return found if len(found) == processes else None

        for address in wait_for(addresses, f"{processes} addresses"):
            answer = httpx.get(address, trust_env=False, timeout=PATIENCE_S)
            assert "# TYPE unstuck_process_sweep_seconds histogram" in answer.text
            assert httpx.get(address.removesuffix("metrics"), trust_env=False, timeout=PATIENCE_S).status_code == 404
