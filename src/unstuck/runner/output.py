"""Keep what jobs print: bounded, the beginning and the end, with a line that says how much is missing."""

import sys
from contextvars import ContextVar
from typing import Any, TextIO


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
        room = self._limit - self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
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
