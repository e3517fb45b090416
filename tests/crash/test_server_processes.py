"""`unstuck serve --processes N`: several processes on one socket that die, are replaced, and end together."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.support.fleet import wait_for
from tests.support.http_server import PATIENCE_S, Served, serve
from tests.support.postgres import PgServer
from tests.support.signals import OwnProcess, send_signal
from tests.support.sqlite import ready_sqlite

from unstuck.config import Settings
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.open import ready_ledger


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield ready_sqlite(tmp_path)
        return
    server: PgServer = request.getfixturevalue("pg_server")
    made = server.new_ledger()
    yield made
    server.drop_database(made)


def children(served: Served) -> set[int]:
    return {child.pid for child in OwnProcess(served.process.pid).children()}


def fresh(served: Served, method: str, path: str, **more: Any) -> httpx.Response:
    """Ask over a connection of its own, which any of the processes may take."""
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, trust_env=False) as client:
        return client.request(method, path, **more)


def test_a_killed_process_is_replaced_and_explained_and_all_end_together(url: str) -> None:
    with serve(url, "--processes", "2") as served:
        wait_for(lambda: len(children(served)) == 2, "two processes")
        before = children(served)
        victim = min(before)
        send_signal(victim, signal.SIGKILL)
        assert all(fresh(served, "GET", "/healthz").status_code == 200 for _ in range(10))
        wait_for(lambda: len(children(served)) == 2 and victim not in children(served), "a new process")
        assert "ended unexpectedly" in served.said()
        assert "killed by SIGKILL" in served.said()
        assert f"pid={victim}" in served.said().replace('"pid": ', "pid=")
        family = children(served)
        served.process.terminate()
        assert served.process.wait(PATIENCE_S) == 0
        assert not any(psutil.pid_exists(pid) for pid in family)
        assert "Traceback" not in served.said()


def test_whatever_process_is_asked_a_worker_goes_on_where_it_was(url: str) -> None:
    ledger = ready_ledger(Settings(url=url))
    try:
        with serve(url, "--processes", "3") as served:
            body = {"name": "one", "queues": ["q"], "tasks": ["t"], "heartbeat_timeout": 60}
            worker = fresh(served, "POST", "/api/v1/workers", json=body).json()["id"]
            jobs = [one.job_id for one in ledger.jobs.enqueue([NewJob("t", "q", b"{}") for _ in range(12)])]
            held: list[dict[str, Any]] = []
            seen: list[int] = []
            while held or len(seen) < len(jobs):
                settle = [{**job, "outcome": "succeeded", "result": 1} for job in held]
                asked = {"settle": settle, "claim": 1, "have": [job["token"] for job in held]}
                said = fresh(served, "POST", f"/api/v1/workers/{worker}/turn", json=asked).json()
                assert [result["status"] for result in said["results"]] == ["succeeded"] * len(held)
                held = [{"job_id": job["job_id"], "token": job["token"]} for job in said["jobs"]]
                seen += [job["job_id"] for job in held]
            assert seen == jobs
            assert {job.state for job in (ledger.jobs.get(number) for number in jobs) if job} == {"succeeded"}
            # Only one of them watches over workers: what one would do, three must not do three times.
            assert served.said().count("Traceback") == 0
    finally:
        ledger.close()


def test_processes_do_not_outlive_their_parent(tmp_path: Path) -> None:
    with serve(ready_sqlite(tmp_path), "--processes", "2") as served:
        wait_for(lambda: len(children(served)) == 2, "two processes")
        family = OwnProcess(served.process.pid).children()
        served.process.kill()
        wait_for(lambda: all(process.ended for process in family), "the end of its processes")


def test_the_limit_of_a_caller_is_one_for_all_processes(tmp_path: Path) -> None:
    env = {"UNSTUCK_HTTP_REQUESTS_PER_SECOND": "1"}
    with serve(ready_sqlite(tmp_path), "--processes", "3", env=env) as served:
        wait_for(lambda: len(children(served)) == 3, "three processes")
        statuses = [fresh(served, "GET", "/api/v1/nowhere").status_code for _ in range(24)]
        # Ten at once, and one more per second.
        assert statuses.count(404) < 24
        assert 429 in statuses
