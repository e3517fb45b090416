"""Answer the worker when it asks where the threads of this process stand.

The pulse does it, with the GIL: no thread is in motion then, and none of them notices. A signal would cut short what
the job waits for, and a dump from inside its handler may kill.
"""

import os
from contextlib import suppress

from unstuck.runner import stacks
from unstuck.runner.signs import Signs


class Answering:
    """Questions come on the socket of the signs. Made before any job runs; used by the pulse alone."""

    def __init__(self, signs: Signs, stack_fd: int) -> None:
        self._signs = signs
        self._stack_fd = stack_fd
        # User code may close descriptors that it did not open: the next file with that number is its own.
        self._ours = {fd: _identity(fd) for fd in (signs.fileno(), stack_fd)}

    def fileno(self) -> int:
        return self._signs.fileno()

    def answer(self) -> bool:
        """Write down what was asked for; False when no more questions can come."""
        if not self._is_ours(self._signs.fileno()):
            return False
        number = self._signs.question()
        if number:
            # Straight after the call that took the GIL: for the next milliseconds nobody asks to have it back, and all
            # stacks are of one moment.
            text = stacks.of_threads()
            with suppress(OSError):
                if self._is_ours(self._stack_fd):
                    os.write(self._stack_fd, f"\n{text}\n".encode("utf-8", "backslashreplace"))
                    self._signs.noted(number)
        return number is not None

    def _is_ours(self, fd: int) -> bool:
        found = _identity(fd)
        return found is not None and found == self._ours.get(fd)


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
