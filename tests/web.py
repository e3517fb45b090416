"""Open a real web door for tests: `unstuck serve` in a process of its own, and a client that knows its address."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests import forked

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Served:
    """A web door that is open."""

    url: str
    client: httpx.Client
    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        """Give what it logged so far."""
        return self.log.read_text(errors="replace")


@contextmanager
def serving(
    url: str, *arguments: str, env: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Serve the ledger at this address and give a client of it; everything ends with the block."""
    with opened(url, *arguments, env=env, headers=headers) as served:
        yield served.client


@contextmanager
def opened(
    url: str, *arguments: str, env: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Like `serving`, with the process and its log."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as file:
            process = forked.start(
                "unstuck.cli.main",
                "serve",
                "--port",
                "0",
                "--json",
                *arguments,
                cwd=ROOT,
                env={**kept, "UNSTUCK_URL": url, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        try:
            address = _address(process, log)
            with httpx.Client(base_url=address, timeout=PATIENCE_S, headers=headers, trust_env=False) as client:
                yield Served(address, client, process, log)
        finally:
            _end(process)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    text = ""
    while True:
        line = process.stdout.readline()
        assert line, f"the server ended with {process.wait(PATIENCE_S)}:\n{log.read_text(errors='replace')}"
        text += line
        said: Any = None
        try:
            said = json.loads(text)
        except ValueError:
            continue
        return str(said["url"])


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()
