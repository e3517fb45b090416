"""Probes and metrics over HTTP: what answers, what says that it is wrong, and with which cure."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.support.cli import Cli
from tests.support.fleet import wait_for
from tests.support.http_server import PATIENCE_S, serve, serving
from tests.support.network_proxy import Proxy


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    if request.param == "sqlite":
        return Cli(f"sqlite:///{tmp_path}/jobs.db", tmp_path)
    return Cli(str(request.getfixturevalue("ready_pg_url")), tmp_path)


def codes(client: httpx.Client) -> list[str]:
    return [trouble["code"] for trouble in client.get("/api/v1/health").json()["troubles"]]


def test_a_monitor_is_told_what_is_missing_and_the_cure(shop: Cli) -> None:
    with serving(shop.url, env={"UNSTUCK_HTTP_REAP": "false"}) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json() == {"status": "ok"}
        empty = client.get("/api/v1/health").json()
        assert empty["status"] == "ok"
        assert empty["workers"] == {}
        assert empty["reaper_overdue_seconds"] is None
        shop.jobs(2)
        assert codes(client) == ["no-worker-for-queue"]
        health = client.get("/api/v1/health").json()
        assert (health["status"], health["troubles"][0]["severity"]) == ("failing", "problem")
        assert health["queues_without_workers"] == ["default"]
        assert "unstuck worker" in health["troubles"][0]["cure"]
        shop.worker()
        health = client.get("/api/v1/health").json()
        assert (health["status"], health["workers"]) == ("ok", {"active": 1}), "a reaper had no time for a round yet"
        with shop.ledger() as ledger:
            ledger.maintenance.take_ticket("sweep", 3600.0)
        # Metrics of the same moment; scrapes within a second share an answer.
        for line in (
            'unstuck_jobs{queue="default",state="pending"} 2\n',
            'unstuck_jobs_ended_total{queue="default",state="quarantined"} 0\n',
            "unstuck_sweep_overdue_seconds 0\n",
        ):
            wait_for(lambda line=line: line in client.get("/metrics").text, line, every_s=0.1)  # type: ignore[misc]


def test_a_door_whose_ledger_is_gone_is_alive_and_not_ready_and_says_why(tmp_path: Path) -> None:
    shop = Cli(f"sqlite:///{tmp_path}/jobs.db", tmp_path)
    with serving(shop.url) as client:
        assert client.get("/readyz").status_code == 200
        for path in tmp_path.glob("jobs.db*"):
            path.rename(tmp_path / f"away-{path.name}")
        answer = client.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        problem = json.loads(answer.text)
        assert problem["code"]
        assert problem["cure"]
        assert client.get("/healthz").status_code == 200
        assert client.get("/metrics").status_code == 503


def test_whoever_asks_for_the_first_lines_alone_gets_those_of_a_get(shop: Cli) -> None:
    with serve(shop.url) as served:
        for path in ("/healthz", "/readyz", "/metrics", "/", "/api/v1/queues", "/static/style.css"):
            head, whole = served.client.head(path), served.client.get(path)
            assert (path, head.status_code, head.content) == (path, 200, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
        for path in ("/api/v1/events", "/live?room=overview"):
            # Streams, which would not end.
            assert served.client.head(path).status_code == 200, path
        assert served.client.head("/nowhere").status_code == 404
        assert served.client.head("/api/v1/jobs/cancel").status_code in (404, 405, 422)
        assert "Traceback" not in served.said()


def test_whether_it_is_ready_is_said_also_where_the_database_is_silent(ready_pg_url: str) -> None:
    proxy = Proxy(ready_pg_url)
    try:
        with serve(proxy.url) as served:
            assert served.client.get("/readyz").status_code == 200
            proxy.cut()
            answer = served.client.get("/readyz")
            assert (answer.status_code, answer.json()["code"]) == (503, "ledger_silent")
            assert served.client.get("/healthz").status_code == 200
            proxy.heal()
            wait_for(lambda: served.client.get("/readyz").status_code == 200, "the ledger's return")
    finally:
        proxy.close()


def test_a_door_that_is_asked_to_end_ends_also_where_the_database_is_silent(ready_pg_url: str) -> None:
    proxy = Proxy(ready_pg_url)
    try:
        with serve(proxy.url, points=["http.request_received"]) as served:
            # From the first beat on somebody looks after workers here, once a second.
            assert served.client.post("/api/workers/heartbeat", json={"worker_id": "one"}).status_code == 200
            proxy.cut()
            with pytest.raises(httpx.ReadTimeout):
                served.client.get("/metrics", timeout=2.0)
            before = served.passed("http.request_received")
            asked = [("GET", "/api/v1/workers"), ("GET", "/metrics"), ("POST", "/api/workers/heartbeat"), ("GET", "/")]
            with ThreadPoolExecutor(len(asked)) as pool:
                answers = [pool.submit(served.client.request, *one, json={"worker_id": "one"}) for one in asked]
                # They wait for the database when it is asked to end.
                served.wait_passed("http.request_received", before + len(asked))
                served.process.terminate()
            for answer in (future.result() for future in answers):
                assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
                assert answer.headers["Retry-After"]
            # In order if its calls gave up in time (each has a deadline), and otherwise without waiting for them.
            code = served.process.wait(PATIENCE_S)
            assert code in (0, 1)
            assert ("Ended without waiting" in served.said()) == (code == 1)
    finally:
        proxy.close()
