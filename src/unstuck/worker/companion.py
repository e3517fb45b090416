"""A process that stands beside the workers of a supervisor and holds no jobs: the web door of `unstuck up --dashboard`.

It is replaced when it dies, ever more slowly where it does not stay up; the workers go on all the same.
"""

import os
import signal
from collections.abc import Sequence

from unstuck import logs
from unstuck.worker.exits import Exit
from unstuck.worker.places import Place
from unstuck.worker.replacing import Replacing

GRACE_S = 10.0

log = logs.logger("unstuck.supervisor")


class Companion:
    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._command = list(command)
        self._place = Place(0, Replacing())
        self._kill_at_s: float | None = None

    @property
    def pid(self) -> int:
        return self._place.pid

    def tend(self, now_s: float) -> None:
        """Start it where it is missing."""
        place = self._place
        if place.empty and now_s >= place.replacing.at_s:
            place.fill(self._command, {}, now_s)
            place.ready_s = now_s
            log.info(f"{self._name} started", pid=place.pid)

    def lost(self, end: Exit, now_s: float) -> None:
        """It was reaped."""
        place = self._place
        wait_s = place.replacing.after_death(now_s, lived_s=place.worked_s(now_s), code=end.code)
        place.pid = 0
        if self._kill_at_s is not None or end.code == 0:
            place.retired = True
        else:
            log.error(f"{self._name} ended; starting it again", how=str(end), again_in_s=wait_s)

    def stop(self, now_s: float) -> None:
        """Ask it to end; who asks again after its grace kills it."""
        if self._kill_at_s is None:
            self._kill_at_s = now_s + GRACE_S
            self._place.retired = True
            self._place.send(signal.SIGTERM)
        elif now_s >= self._kill_at_s:
            self._place.send(signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing behind, whatever it takes."""
        if self._place.pid:
            self._place.send(signal.SIGKILL)
            os.waitpid(self._place.pid, 0)
            self._place.pid = 0
