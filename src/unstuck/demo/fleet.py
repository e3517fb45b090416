"""Start the workers and the dashboard of the demo, and kill workers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from unstuck.cli.run import is_http_installed
from unstuck.domain.states import LIVE_STATES
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.runner.status_page import status_page_path

PATIENCE_S = 10.0


class DemoDashboard:
    """`unstuck serve` on a free port of this machine; `url` is empty until it answers, and where it cannot be had."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._folder = folder
        self._wanted = wanted and is_http_installed()
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        if self._wanted:
            # Nobody is woken at night because a demo killed its workers: no alerts, no settings but the ledger.
            others = ("UNSTUCK_HTTP_", "UNSTUCK_ALERTS_")
            kept = {name: text for name, text in os.environ.items() if not name.startswith(others)}
            with (self._folder / "serve.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "unstuck.cli.main", "serve", "--port", "0", "--json"],
                    cwd=self._folder,
                    env=kept,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    # Ctrl-C at the terminal is for us: we end it when the picture is complete.
                    process_group=0,
                )
            threading.Thread(target=self._hear, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        said = ""
        with process.stdout:
            # Where it does not come up this ends: the demo goes on without it, and its log says why.
            for line in process.stdout:
                said += line
                if said.count("{") and said.count("{") == said.count("}"):
                    self.url = str(json.loads(said)["url"])
                    return


CONCURRENCY = 8
MAX_STARTS = 1_000
"""A fleet that cannot live must not be restarted for ever."""
MAX_UNEXPECTED = 20
SHOWN_DEAD_S = 1.0
"""How long an empty place is left for people to see."""
LEAVE_S = 20.0
HURRY_S = 2.0


@dataclass
class Member:
    """One worker process of the fleet. Its name is that of its place, with the generation behind it."""

    place: int
    generation: int
    process: subprocess.Popen[bytes]
    log: Path
    worker_id: str | None = None
    ready: bool = False
    killed_s: float | None = None
    """When the demo killed it (monotonic)."""

    @property
    def name(self) -> str:
        return f"w{self.place}" if self.generation == 1 else f"w{self.place}.{self.generation}"

    @property
    def pid(self) -> int:
        return self.process.pid


class Fleet:
    """Used by the demo's main thread alone, but for `ready_members`: workers leave when their starter does."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self._places: list[Member] = []
        self._gone: list[Member] = []
        self.unexpected: list[str] = []
        """One sentence for each worker that ended without having been asked or killed."""

    @property
    def members(self) -> list[Member]:
        """Who stands in each place now, the dead included until they are replaced."""
        return list(self._places)

    @property
    def pids(self) -> set[int]:
        return {member.pid for member in (*self._places, *self._gone)}

    def ready_members(self) -> list[Member]:
        return [m for m in self.members if m.ready and m.killed_s is None and m.process.poll() is None]

    def launch(self) -> None:
        self._places = [self._start(place, 1) for place in range(1, self._size + 1)]

    def tend(self) -> list[Member]:
        """Replace the dead and give their replacements."""
        fresh = []
        for at, member in enumerate(self._places):
            code = member.process.poll()
            if code is None or len(self._gone) >= MAX_STARTS or len(self.unexpected) >= MAX_UNEXPECTED:
                continue
            if member.killed_s is not None and time.monotonic() - member.killed_s < SHOWN_DEAD_S:
                continue
            if member.killed_s is None:
                self.unexpected.append(f"worker {member.name} ended by itself with code {code}: {_last_words(member)}")
            self._gone.append(member)
            self._places[at] = self._start(member.place, member.generation + 1)
            fresh.append(self._places[at])
        return fresh

    def recognise(self, records: list[WorkerRecord]) -> None:
        """Learn from the ledger who of the fleet is there."""
        by_pid = {record.pid: record for record in records if record.state in LIVE_STATES}
        for member in self._places:
            if record := by_pid.get(member.pid):
                member.worker_id, member.ready = record.id, True

    def send_home(self, hurry: bool = False) -> None:
        """Ask all to leave, wait for a bounded while, and kill who is left."""
        members = self._places
        for _ in range(2 if hurry else 1):
            for member in members:
                member.process.send_signal(signal.SIGTERM)
            # Signals of one kind that arrive together count as one: the second must come later.
            time.sleep(0.1 if hurry else 0.0)
        deadline_s = time.monotonic() + (HURRY_S if hurry else LEAVE_S)
        for member in members:
            try:
                member.process.wait(max(0.05, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

    def forget(self, ledger: Ledger) -> None:
        """Remove what killed workers left in shared memory, where no neighbour was left to do it."""
        for record in ledger.workers.list():
            if record.pid in self.pids:
                status_page_path(record.id).unlink(missing_ok=True)

    def _start(self, place: int, generation: int) -> Member:
        name = f"w{place}.{generation}"
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "unstuck.demo.worker", str(os.getpid())]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--name", f"demo-{name}", "--concurrency", str(CONCURRENCY)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the demo, which then sends them home itself.
                start_new_session=True,
            )
        return Member(place, generation, process, log)


def _last_words(member: Member) -> str:
    lines = member.log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
