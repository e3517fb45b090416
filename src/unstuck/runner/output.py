"""Keep what jobs print: bounded, the beginning and the end, for each job of a process."""

import os
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from unstuck.runner import linux


def left_out(count: int) -> bytes:
    return f"\n… {count:,} bytes left out …\n".encode()


class Bounded:
    """Bytes of which the first and the last are kept."""

    __slots__ = ("_half", "_head", "_limit", "_tail", "_total")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        cgroup = self._limit - self._half - len(self._head)
        if cgroup > 0:
            self._head += data[:cgroup]
            data = data[cgroup:]
        self._tail += data[-self._half :] if self._half else b""
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def content(self) -> bytes:
        if not self._limit:
            return b""
        tail = self._tail[-self._half :] if self._half else b""
        missing = self._total - len(self._head) - len(tail)
        return bytes(self._head + left_out(missing) + tail) if missing > 0 else bytes(self._head + tail)


class Sink:
    """Where the prints of one async job go."""

    __slots__ = ("_limit", "streams")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.streams: list[Bounded | None] = [None, None]

    def add(self, stream: int, text: str) -> None:
        buffer = self.streams[stream]
        if buffer is None:
            buffer = self.streams[stream] = Bounded(self._limit)
        buffer.add(text.encode("utf-8", "backslashreplace"))

    def content(self, stream: int) -> bytes:
        buffer = self.streams[stream]
        return b"" if buffer is None else buffer.content()


_sink: ContextVar[Sink | None] = ContextVar("unstuck_sink", default=None)


def set_sink(sink: Sink) -> None:
    _sink.set(sink)


class Router:
    """Stand in for sys.stdout or sys.stderr: jobs that have a sink write there, all others to the real file.

    It is put in place before the app is imported, so that a logging handler made there holds it too."""

    def __init__(self, real: TextIO, stream: int) -> None:
        self._real = real
        self._stream = stream

    def write(self, text: str) -> int:
        sink = _sink.get()
        if sink is None:
            return self._real.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        sink.add(self._stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def install_routers() -> None:
    """Route sys.stdout and sys.stderr by the job that prints."""
    if sys.stdout is not None:
        sys.stdout = Router(sys.stdout, 0)
    if sys.stderr is not None:
        sys.stderr = Router(sys.stderr, 1)


def flush_standard_streams() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except BaseException:  # noqa: BLE001 - user code may have closed, replaced or deleted it
            pass


PUNCH_BYTES = 1024 * 1024
"""Give memory back in steps of this size: a system call per job would cost more than it saves."""


class OutputFile:
    """One of stdout and stderr: an append-only file in memory that only grows, with holes where it was read."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.fd = linux.memory_file(name)
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
            linux.punch_hole(self.fd, self._punched, end)
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
            linux.punch_hole(self.fd, begin, tail_start)
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
