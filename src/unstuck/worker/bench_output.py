"""Read what a runner's jobs printed out of its two shared files, and keep those files small."""

import os

from unstuck.runner import kernel
from unstuck.runner.output import left_out

PUNCH_BYTES = 1024 * 1024
"""Give memory back in steps of this size: a system call per job would cost more than it saves."""


class OutputFile:
    """One of stdout and stderr: an append-only file in memory that only grows, with holes where it was read."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.fd = kernel.memory_file(name)
        self._limit = limit_bytes
        self._start = 0
        """Where the output of the current job begins."""
        self._punched = 0
        self._told = 0
        """How large it was when `news` was last asked."""

    def news(self, limit_bytes: int) -> bytes | None:
        """Return the end of what the current job has printed; None if that is the same as before."""
        size = self._size()
        if size == self._told or not self._limit:
            return None
        self._told = size
        begin = max(min(self._start, size), size - limit_bytes)
        return os.pread(self.fd, size - begin, begin)

    def take(self, start: int, end: int) -> bytes:
        """Give the bounded output of a job that ended, and move on to the next."""
        if end < start:  # user code truncated the file (`> /dev/stdout`)
            start = self._punched = 0
        content = self._read(start, end)
        self._start = end
        if end - self._punched >= PUNCH_BYTES:
            kernel.punch_hole(self.fd, self._punched, end)
            self._punched = end
        return content

    def skip(self) -> None:
        """Leave behind what was written so far."""
        self.take(self._start, self._size())

    def peek(self, *, tail_only: bool = False) -> bytes:
        """Give the bounded output of the current job so far."""
        size = self._size()
        start = min(self._start, size)
        return self._read(max(start, size - self._limit) if tail_only else start, size)

    def trim(self, *, tail_only: bool = False) -> None:
        """Give back the memory of what will never be read, while a job goes on printing."""
        head_end = self._start + (0 if tail_only else self._limit - self._limit // 2)
        tail_start = self._size() - (self._limit if tail_only else self._limit // 2)
        begin = max(head_end, self._punched)
        if tail_start - begin >= PUNCH_BYTES:
            kernel.punch_hole(self.fd, begin, tail_start)
            if tail_only:
                self._punched = tail_start

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _size(self) -> int:
        return os.fstat(self.fd).st_size

    def _read(self, start: int, end: int) -> bytes:
        if end <= start or not self._limit:
            return b""
        if end - start <= self._limit:
            return os.pread(self.fd, end - start, start)
        half = self._limit // 2
        head = os.pread(self.fd, self._limit - half, start)
        tail = os.pread(self.fd, half, end - half) if half else b""
        return head + left_out(end - start - len(head) - len(tail)) + tail
