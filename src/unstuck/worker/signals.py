"""Count the signals that ask a worker or a supervisor to stop; their loops look at the count."""

import faulthandler
import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOGETHER_S = 0.5
"""SIGTERM again within this time is the same one: the kernel sends the last signal of a killed supervisor once for
each of its threads. Who wants to hurry waits a moment, or sends SIGINT."""


def heeded() -> tuple[signal.Signals, ...]:
    """Give the signals that ask to stop; under nohup a hangup is ignored, and stays so."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not deaf)


class StopRequests:
    """How often somebody wished for the end: the first means in order, those that follow mean to hurry."""

    def __init__(self) -> None:
        self.count = 0
        self._terminated_s = -TOGETHER_S

    def note(self, number: int) -> None:
        """Count a signal, unless it repeats a wish; called by its handler."""
        if number == signal.SIGHUP and self.count:
            # The terminal is gone. It may say so twice, and never means to hurry.
            return
        if number == signal.SIGTERM:
            now_s = time.monotonic()
            if now_s - self._terminated_s < TOGETHER_S:
                return
            self._terminated_s = now_s
        self.count += 1


class StopSignals:
    """Installed once, in the main thread. Calling it gives how many signals came so far."""

    def __init__(self) -> None:
        self._wishes = StopRequests()
        for number in heeded():
            signal.signal(number, self._note)
        # "What are you doing?": by default this signal would kill. The main thread's stack at once, even from inside C
        # code; those of all threads as soon as it has the GIL: to read them while they run may kill.
        signal.signal(signal.SIGUSR1, lambda *_: faulthandler.dump_traceback())
        faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)

    def __call__(self) -> int:
        return self._wishes.count

    def wake(self, fd: int) -> None:
        """Have each signal wake whoever selects on the other end of `fd`; -1 for nobody."""
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._wishes.note(number)
