"""Measure heartbeats over HTTP, on connections that stay open and with little code between clock and socket."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.http_server import Served, serve

from bench.databases import Database
from bench.processes import cpu_of_family
from bench.report import Table
from unstuck.config import HttpSettings, Settings
from unstuck.ledger.contract.workers import RemoteHeartbeat
from unstuck.ledger.open import ready_ledger

MAX_ANSWER_BYTES = 64 * 1024 * 1024


class Answer(NamedTuple):
    status: int
    body: bytes
    server_ms: float


class Connection:
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


CONNECTIONS = 200
"""Connections that stay open; each is shared by a few workers."""
PAGE_EVERY_S = 1.0
BARE_HEARTBEATS = 500
GOAL_MS = 5.0

Ask = Callable[[Connection], Awaitable[float]]
"""Returns the server's time in ms."""
Took = tuple[float, float]


def run(databases: list[Database], workers: int, seconds: float) -> Table:
    interval_s = HttpSettings().heartbeat_interval_s
    table = Table(
        "http-heartbeats",
        f"{workers:,} remote workers that send a heartbeat every {interval_s:g} s, and a page loaded every second",
        ("p50 ms", "p99 ms", "max ms", "round trip p50 ms", "round trip p99 ms", "CPU ms each"),
        notes=[
            "Server time, from the request to its answer (Server-Timing); then the same as the client sees it.",
            f"The goal is p99 of a heartbeat below {GOAL_MS:g} ms. The bare route does nothing and shows the noise.",
            f"{workers / interval_s:.1f} requests per second. CPU is the server's while only that kind was sent.",
            "A heartbeat carries metadata that change.",
        ],
    )
    for database in databases:
        url = database.fresh()
        try:
            with serve(url) as served:
                asyncio.run(_measure(table, database.name, served, workers, seconds, interval_s))
            _bare(table, database.name, url)
        finally:
            database.drop(url)
    return table


async def _measure(table: Table, name: str, served: Served, workers: int, seconds: float, interval_s: float) -> None:
    address = urlsplit(served.url)
    assert address.hostname is not None
    assert address.port is not None
    connections = [Connection(address.hostname, address.port) for _ in range(CONNECTIONS)]
    page = Connection(address.hostname, address.port)
    numbers = dict.fromkeys(range(workers), 0)

    def beat(number: int) -> Ask:
        numbers[number] += 1
        metadata = {"hostname": f"host-{number % 50}", "pid": number, "tasks_processed": numbers[number]}
        body = {"worker_id": f"bench-{number}", "metadata": metadata}
        return lambda connection: _ok(connection.ask("POST", "/api/workers/heartbeat", body))

    for start in range(0, workers, CONNECTIONS):
        numbered = zip(range(start, workers), connections, strict=False)
        await asyncio.gather(*(beat(number)(connection) for number, connection in numbered))
    rate = workers / interval_s
    # The first page that a server draws takes longer: its templates are read.
    await page.ask("GET", "/")
    loading = asyncio.create_task(_load_page(page))
    try:
        # In turns, so that what the machine does meanwhile does not count for one of them alone.
        kinds: dict[str, list[Took]] = {"heartbeat": [], "bare route": []}
        cpu_s = dict.fromkeys(kinds, 0.0)
        for _ in range(4):
            for kind in kinds:
                before = cpu_of_family(served.process.pid).all_s
                kinds[kind] += await _at_pace(
                    connections, rate, seconds / 4, beat if kind == "heartbeat" else lambda _: _ping, workers
                )
                cpu_s[kind] += cpu_of_family(served.process.pid).all_s - before
    finally:
        loading.cancel()
        for connection in (*connections, page):
            connection.close()
    for kind, took in kinds.items():
        server, client = [one[0] for one in took], [one[1] for one in took]
        table.add(f"{name}: {kind}", *_figures(server), *_figures(client)[:2], 1000 * cpu_s[kind] / len(took))


async def _at_pace(
    connections: Sequence[Connection], rate: float, seconds: float, make: Callable[[int], Ask], workers: int
) -> list[Took]:
    """Send at a steady pace, whether or not the answers keep up."""
    took: list[Took] = []

    async def one(ask: Ask, connection: Connection) -> None:
        begun_s = time.perf_counter()
        server_ms = await ask(connection)
        took.append((server_ms, 1000 * (time.perf_counter() - begun_s)))

    begun_s = time.monotonic()
    pending: set[asyncio.Task[None]] = set()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun_s + (number + random.random()) / rate - time.monotonic()))
        # A connection that is free: a request that waits for another's answer would measure that one.
        connection = connections[number % len(connections)]
        pending.add(asyncio.create_task(one(make(random.randrange(workers)), connection)))
    await asyncio.gather(*pending)
    return took


async def _load_page(connection: Connection) -> None:
    while True:
        await connection.ask("GET", "/")
        await asyncio.sleep(PAGE_EVERY_S)


async def _ping(connection: Connection) -> float:
    return await _ok(connection.ask("GET", "/healthz"))


async def _ok(asking: Awaitable[Answer]) -> float:
    answer = await asking
    assert answer.status == 200, answer.body[:500]
    return answer.server_ms


def _bare(table: Table, name: str, url: str) -> None:
    """Send the same heartbeats without HTTP, one by one, in one process."""
    ledger = ready_ledger(Settings(url=url))
    took = []
    try:
        ids = [worker.id for worker in ledger.workers.list(living_only=True)]
        for number in range(BARE_HEARTBEATS):
            begun_s = time.perf_counter()
            ledger.workers.record_heartbeats(
                [RemoteHeartbeat(random.choice(ids), metadata={"tasks_processed": number})]
            )
            took.append(1000 * (time.perf_counter() - begun_s))
    finally:
        ledger.close()
    table.add(f"{name}: bare ledger", *_figures(took), None, None, None)


def _figures(took: list[float]) -> tuple[float, float, float]:
    ordered = sorted(took)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]
