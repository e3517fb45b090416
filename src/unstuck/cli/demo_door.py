"""Open the web door beside the demo, where its packages are installed: whoever wants to can watch in a browser."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from unstuck.cli.web import is_installed

PATIENCE_S = 10.0


class DemoDoor:
    """`unstuck serve` on a free port of this machine; `url` is empty until it answers, and where it cannot be had."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._folder = folder
        self._wanted = wanted and is_installed()
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        if self._wanted:
            # Nobody is woken at night because a demo killed its workers: no alerts, no settings but the ledger.
            others = ("UNSTUCK_WEB_", "UNSTUCK_ALERTS_")
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
