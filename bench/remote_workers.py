"""Measure jobs per second of a remote worker on one connection, beside the bare ledger and a bare route."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import apsw
import psycopg
from tests.support.builders import birth
from tests.support.http_server import Served, serve

from bench.databases import Database
from bench.http_heartbeats import Connection
from bench.processes import cpu_of_family
from bench.report import Table
from unstuck.config import Settings
from unstuck.domain.states import Transport
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob, TaskRecord
from unstuck.ledger.contract.workers import ClaimRequest, Success, Turn
from unstuck.ledger.open import ready_ledger

ROUNDS = 3
QUEUE, TASK = "bench", "work"
PAYLOAD = b'{"args":["a.png",100]}'
ENQUEUED_AT_ONCE = 1_000

Step = Callable[[], Awaitable[int]]
"""Does some jobs and returns how many."""


def run(databases: list[Database], seconds: float, batch: int) -> Table:
    table = Table(
        "remote-workers",
        "One remote worker on one connection, jobs that do nothing",
        ("jobs per s", "ms per request", "server CPU ms per job", "of bare ledger"),
        notes=[
            "In turns within one run. The bare ledger takes the same turns without HTTP.",
            "The bare commit changes one row and waits for the disk: no job that comes alone can be faster.",
            "The bare route is GET /healthz, in requests per second.",
            f"The goal is 1,000 jobs per second without batches and 10,000 with batches of {batch}.",
        ],
    )
    for database in databases:
        url = database.fresh()
        ledger = ready_ledger(Settings(url=url))
        try:
            with (
                serve(url, env={"UNSTUCK_HTTP_REQUESTS_PER_SECOND": "0"}) as served,
                _committing(database) as commit,
            ):
                asyncio.run(_measure(table, database.name, served, ledger, commit, seconds, batch))
        finally:
            ledger.close()
            database.drop(url)
    return table


async def _measure(
    table: Table, name: str, served: Served, ledger: Ledger, commit: Step, seconds: float, batch: int
) -> None:
    address = urlsplit(served.url)
    assert address.hostname is not None
    assert address.port is not None
    connection = Connection(address.hostname, address.port)
    worker = Remote(connection)
    await worker.register()
    kinds: dict[str, tuple[int, Step]] = {
        "bare commit": (0, commit),
        "bare ledger, one job per turn": (1, _bare(ledger, "bare1", 1)),
        f"bare ledger, {batch} jobs per turn": (batch, _bare(ledger, "barebatch", batch)),
        "bare route": (0, lambda: _ping(connection)),
        "claim, start, settle": (1, worker.three_requests),
        "turn": (1, lambda: worker.turn(1)),
        f"turn, {batch} jobs per request": (batch, lambda: worker.turn(batch)),
    }
    done = dict.fromkeys(kinds, 0)
    steps = dict.fromkeys(kinds, 0)
    took_s = dict.fromkeys(kinds, 0.0)
    cpu_s = dict.fromkeys(kinds, 0.0)
    for _ in range(ROUNDS):
        for kind, (size, step) in kinds.items():
            until_s = seconds / ROUNDS
            while took_s[kind] < until_s * (_ + 1):
                if size:
                    _fill(ledger, size * 50)
                before = cpu_of_family(served.process.pid).all_s
                begun_s = time.perf_counter()
                for _step in range(40):
                    done[kind] += await step()
                    steps[kind] += 1
                took_s[kind] += time.perf_counter() - begun_s
                cpu_s[kind] += cpu_of_family(served.process.pid).all_s - before
    connection.close()
    rates = {kind: (done[kind] or steps[kind]) / took_s[kind] for kind in kinds}
    unserved = [kind for kind in kinds if kind.startswith(("bare ledger", "bare commit"))]
    bare = {size: rates[kind] for kind, (size, _) in kinds.items() if kind.startswith("bare ledger")}
    for kind, (size, _) in kinds.items():
        cpu_ms = None if kind in unserved else 1000 * cpu_s[kind] / (done[kind] or steps[kind])
        ratio = None if kind.startswith("bare") else rates[kind] / bare[size]
        table.add(f"{name}: {kind}", rates[kind], 1000 * took_s[kind] / steps[kind], cpu_ms, ratio)


class Remote:
    """A worker over HTTP that does each job by answering it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._id = ""
        self._held: list[dict[str, Any]] = []

    async def register(self) -> None:
        body = {"name": "bench", "queues": [QUEUE], "tasks": [TASK]}
        self._id = (await self._ask("POST", "/api/v1/workers", body, 201))["id"]

    async def three_requests(self) -> int:
        await self._hand_in()
        path = f"/api/v1/workers/{self._id}"
        [job] = (await self._ask("POST", f"{path}/claim", {}))["jobs"]
        key = {"job_id": job["job_id"], "token": job["token"]}
        await self._ask("POST", f"{path}/start", {"jobs": [key]})
        await self._ask("POST", f"{path}/settle", {"jobs": [{**key, "outcome": "succeeded", "result": 1}]})
        return 1

    async def turn(self, limit: int) -> int:
        said = await self._ask("POST", f"/api/v1/workers/{self._id}/turn", {"settle": self._held, "claim": limit})
        assert len(said["jobs"]) == limit
        self._held = [
            {"job_id": job["job_id"], "token": job["token"], "outcome": "succeeded", "result": 1}
            for job in said["jobs"]
        ]
        return limit

    async def _hand_in(self) -> None:
        if self._held:
            await self._ask("POST", f"/api/v1/workers/{self._id}/turn", {"settle": self._held})
            self._held = []

    async def _ask(self, method: str, path: str, body: Any, status: int = 200) -> Any:
        answer = await self._connection.ask(method, path, body)
        assert answer.status == status, answer.body[:500]
        return json.loads(answer.body)


def _bare(ledger: Ledger, worker_id: str, limit: int) -> Step:
    ledger.workers.register(
        birth(
            worker_id,
            name=worker_id,
            host="bench",
            pid=0,
            boot_id="",
            pid_namespace="",
            process_started="",
            queues=(QUEUE,),
            tasks=(TaskRecord(TASK, QUEUE),),
            concurrency=1,
            version="",
            heartbeat_interval_s=30,
            suspect_after_s=300,
            running_stale_after_s=300,
            transport=Transport.HTTP,
        )
    )
    done: tuple[Success, ...] = ()

    async def step() -> int:
        nonlocal done
        answer = ledger.workers.turn(
            Turn(worker_id, done, claim_request=ClaimRequest((QUEUE,), (TASK,), limit, start=limit))
        )
        assert len(answer.claimed) == limit
        done = tuple(Success(job.job_id, job.token, b"1") for job in answer.claimed)
        return limit

    return step


@contextmanager
def _committing(database: Database) -> Iterator[Step]:
    """Yield a step that commits one changed row, as durably as the ledger does."""
    url = database.fresh()
    change = "update bare set n = n + 1 where id = 1"
    try:
        with closing(_plain_connection(url)) as connection:
            connection.execute("create table bare (id integer primary key, n integer)")
            connection.execute("insert into bare values (1, 0)")

            async def step() -> int:
                connection.execute(change)
                return 0

            yield step
    finally:
        database.drop(url)


def _plain_connection(url: str) -> Any:
    if url.startswith("postgresql"):
        return psycopg.connect(url, autocommit=True)
    connection = apsw.Connection(url.removeprefix("sqlite://"))
    connection.execute("pragma journal_mode = wal; pragma synchronous = full")
    return connection


async def _ping(connection: Connection) -> int:
    assert (await connection.ask("GET", "/healthz")).status == 200
    return 0


def _fill(ledger: Ledger, wanted: int) -> None:
    pending = next((queue.pending for queue in ledger.queues.list() if queue.name == QUEUE), 0)
    for _ in range(pending, wanted, ENQUEUED_AT_ONCE):
        ledger.jobs.enqueue([NewJob(TASK, QUEUE, PAYLOAD) for _ in range(ENQUEUED_AT_ONCE)])
