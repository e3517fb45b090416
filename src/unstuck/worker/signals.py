"""Count the signals that ask a worker to stop; the floor looks at the count."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Installed once, in the main thread. Calling it gives how many signals came so far."""

    def __init__(self) -> None:
        self._count = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def __call__(self) -> int:
        return self._count

    def wake(self, fd: int) -> None:
        """Have each signal wake whoever selects on the other end of `fd`; -1 for nobody."""
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
