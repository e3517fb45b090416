"""Measure the Majordomo broker beside a minimal broker that keeps everything in memory."""

import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from bench.databases import Database
from bench.report import Table, progress
from unstuck.domain.frames import write_map

SERVICE = b"echo"
IN_FLIGHT = 100
MEMORY = "sqlite:///:memory:"
PATIENCE_MS = 30_000

Brokers = list[tuple[str, list[str], dict[str, str]]]


def round_trips(databases: list[Database], seconds: float) -> Table:
    table = Table(
        "majordomo-round-trips",
        "Round trips per second, one client, tiny bodies",
        ("1 worker, one by one", "1 worker, 100 in flight", "2 workers, 100 in flight", "of the reference %"),
        notes=[
            "The reference keeps requests in memory and loses them in a crash; it is written in Python as ours is.",
            "The last column compares two workers with 100 in flight. Client and workers are the same plain peers.",
        ],
    )
    best: float | None = None
    with _brokers(databases) as brokers:
        for name, command, env in brokers:
            figures = []
            for workers, in_flight in ((1, 1), (1, IN_FLIGHT), (2, IN_FLIGHT)):
                with _broker(command, env) as endpoint, _workers(endpoint, workers):
                    figures.append(_rate(endpoint, in_flight, seconds))
            best = best or figures[-1]
            table.add(name, *figures, 100 * figures[-1] / best)
    return table


def deaths(databases: list[Database], kills: int) -> Table:
    table = Table(
        "majordomo-deaths",
        "From `kill -9` of a worker until its client is told, milliseconds",
        ("best", "median", "worst"),
        notes=[f"{kills} kills each. The reference sees a death after three heartbeats, 7.5 s."],
    )
    with _brokers(databases) as brokers:
        for name, command, env in brokers[1:]:
            with _broker(command, env) as endpoint:
                took = sorted(_killed(endpoint) for _ in range(kills))
            table.add(name, took[0], statistics.median(took), took[-1])
    return table


@contextmanager
def _brokers(databases: list[Database]) -> Iterator[Brokers]:
    """Yield names, commands and environments; the reference is the first."""
    ours = [sys.executable, "-m", "unstuck", "broker", "--bind", "tcp://127.0.0.1:0"]
    reference = [sys.executable, "-m", "tests.mdp.reference_broker", "--bind", "tcp://127.0.0.1:*"]
    urls = [database.fresh() for database in databases]
    try:
        yield [
            ("reference, in memory", reference, {}),
            ("Unstuck, in memory", ours, {"UNSTUCK_URL": MEMORY}),
            *(
                (f"Unstuck, {database.name}", ours, {"UNSTUCK_URL": url})
                for database, url in zip(databases, urls, strict=True)
            ),
        ]
    finally:
        for database, url in zip(databases, urls, strict=True):
            database.drop(url)


def _killed(endpoint: str) -> float:
    """Kill the worker that has a request; return when its client, which asked for it, was told."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with ExitStack() as stack:
        # A service of its own: the next worker must not get the request of this client.
        service = secrets.token_hex(4).encode()
        worker = stack.enter_context(_workers(endpoint, 1, "--sleep", "60", service=service))[0]
        client = stack.enter_context(context.socket(zmq.DEALER))
        client.linger = 0
        client.set(zmq.ROUTING_ID, secrets.token_hex(16).encode())
        client.connect(endpoint)
        # Deaths alone: a worker that has just started may not be known yet, and a notice of that would come too.
        wish = write_map({"v": 1, "ttl": 60, "events": ["WORKER_DIED"]})
        client.send_multipart([b"", b"MDPC01", b"mmi.notify", wish])
        assert client.poll(PATIENCE_MS), "no answer"
        assert client.recv_multipart()[3] == b"200"
        client.send_multipart([b"", b"MDPC01", service, b"x"])
        _until_busy(worker)
        begun_s = time.perf_counter()
        worker.send_signal(signal.SIGKILL)
        assert client.poll(PATIENCE_MS), "the client was not told"
        took_ms = 1000 * (time.perf_counter() - begun_s)
        assert client.recv_multipart()[2] == b"\x08"
        return took_ms


def _rate(endpoint: str, in_flight: int, seconds: float) -> float:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.connect(endpoint)
    sent = got = 0
    counted, begun_s = 0, 0.0
    until_s = time.perf_counter() + seconds + 1.0
    while (now_s := time.perf_counter()) < until_s:
        if not begun_s and now_s > until_s - seconds:
            begun_s, counted = now_s, got
        while sent - got < in_flight:
            client.send_multipart([b"", b"MDPC01", SERVICE, b"x"])
            sent += 1
        assert client.poll(PATIENCE_MS), "no answer"
        client.recv_multipart()
        got += 1
    rate = (got - counted) / (time.perf_counter() - begun_s)
    client.close()
    return rate


@contextmanager
def _broker(command: list[str], env: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        endpoint = process.stdout.readline().split()[-1]
        progress(f"… {endpoint}")
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextmanager
def _workers(
    endpoint: str, count: int, *more: str, service: bytes = SERVICE
) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "bench.majordomo_worker", endpoint, service.decode(), *more]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def _until_busy(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == "busy"
