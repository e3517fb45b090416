"""Count the signals that ask a worker to stop; the floor looks at the count."""

import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER_S = 0.5
"""SIGTERM again within this time is the same one: the kernel sends the last signal of a killed supervisor once for
each of its threads. Who wants to hurry waits a moment, or sends SIGINT."""


class StopSignals:
    """Installed once, in the main thread. Calling it gives how many signals came so far."""

    def __init__(self) -> None:
        self._count = 0
        self._terminated_s = -TOGETHER_S
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def __call__(self) -> int:
        return self._count

    def wake(self, fd: int) -> None:
        """Have each signal wake whoever selects on the other end of `fd`; -1 for nobody."""
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            now_s = time.monotonic()
            if now_s - self._terminated_s < TOGETHER_S:
                return
            self._terminated_s = now_s
        self._count += 1
