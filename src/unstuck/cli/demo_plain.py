"""Tell the demo in plain lines, one for each event: for pipes, files and logs."""

import threading
from typing import Self, TextIO

from unstuck.cli.demo_fleet import Member
from unstuck.cli.demo_killer import Death
from unstuck.cli.demo_stage import Stage
from unstuck.cli.demo_summary import became
from unstuck.cli.show import one_line

STATUS_EVERY_S = 3.0


class PlainView:
    """Every line is `SECONDS WORD sentence`."""

    def __init__(self, stage: Stage, out: TextIO) -> None:
        self._stage = stage
        self._out = out
        self._lock = threading.Lock()
        self._status_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def started(self, member: Member) -> None:
        self._say("started", f"worker {member.name} (pid {member.pid})")

    def died(self, death: Death) -> None:
        who = f"worker {death.name}" if death.kind == "worker" else f"runner of {death.name}"
        if not death.over:
            self._say("killed", f"{who} (pid {death.pid}) with kill -9, holding {len(death.held)}")
            return
        how = f"seen by {death.detector}" if death.detector else "seen by nobody"
        fast = "" if death.settled_ms is None else f" in {death.settled_ms:.0f} ms"
        self._say("settled", f"{who}: {became(death)}; {how}{fast}")

    def phase(self, sentence: str) -> None:
        self._say("phase", sentence)

    def draw(self) -> None:
        elapsed_s = self._stage.elapsed_s
        if elapsed_s - self._status_s >= STATUS_EVERY_S:
            self._status_s = elapsed_s
            self._say("status", ", ".join(f"{name} {number}" for name, number, _ in self._stage.score()))

    def _say(self, word: str, sentence: str) -> None:
        with self._lock:
            self._out.write(f"{self._stage.elapsed_s:7.2f} {word:<8} {one_line(sentence)}\n")
            self._out.flush()
