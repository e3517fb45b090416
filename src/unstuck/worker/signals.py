"""Count the signals that ask a worker to stop; the floor looks at the count."""

import faulthandler
import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOGETHER_S = 0.5
"""SIGTERM again within this time is the same one: the kernel sends the last signal of a killed supervisor once for
each of its threads. Who wants to hurry waits a moment, or sends SIGINT."""


class StopSignals:
    """Installed once, in the main thread. Calling it gives how many signals came so far."""

    def __init__(self) -> None:
        self._count = 0
        self._terminated_s = -TOGETHER_S
        for number in STOP_SIGNALS:
            # Under nohup a hangup is ignored, and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        # "What are you doing?": the stacks of all threads, to stderr. By default this signal would kill.
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)

    def __call__(self) -> int:
        return self._count

    def wake(self, fd: int) -> None:
        """Have each signal wake whoever selects on the other end of `fd`; -1 for nobody."""
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._count:
            # The terminal is gone. It may say so twice, and never means to hurry.
            return
        if number == signal.SIGTERM:
            now_s = time.monotonic()
            if now_s - self._terminated_s < TOGETHER_S:
                return
            self._terminated_s = now_s
        self._count += 1
