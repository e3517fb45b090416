"""Speak HTTP over connections that stay open, with as little between the clock and the wire as can be."""

import asyncio
import json
from typing import Any, NamedTuple

MAX_ANSWER_BYTES = 64 * 1024 * 1024


class Answer(NamedTuple):
    status: int
    body: bytes
    server_ms: float


class Line:
    """One connection, one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        async with self._lock:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port, limit=MAX_ANSWER_BYTES)
            reader, writer = self._streams
            writer.write(head.encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            answer = await reader.readexactly(int(fields["content-length"]))
            took_ms = float(fields.get("server-timing", "app;dur=nan").rpartition("=")[2])
            return Answer(int(lines[0].split()[1]), answer, took_ms)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
