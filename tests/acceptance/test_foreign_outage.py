"""The database goes away under workers over HTTP: each is told to try again, and nothing that they said is lost."""

import secrets
import signal

import httpx
from tests.fleet import wait_for
from tests.pg import start_postgres
from tests.web import opened


def test_a_ledger_that_is_away_is_a_problem_for_a_moment() -> None:
    token = secrets.token_urlsafe(32)
    with start_postgres() as server:
        url = server.new_ledger()
        # A token that is not in the ledger: else nobody would come as far as the handlers.
        bearer = {"Authorization": f"Bearer {token}"}
        with opened(url, env={"UNSTUCK_WEB_TOKEN": token}, headers=bearer) as served:
            http = served.client
            named = {"name": "one", "queues": ["q"], "tasks": ["resize"]}
            worker = http.post("/api/v1/workers", json=named).json()["id"]
            beat = {"worker_id": "one", "metadata": {"version": "1"}}
            assert http.post("/api/workers/heartbeat", json=beat).status_code == 200
            server.stop(signal.SIGQUIT)
            beat["metadata"] = {"version": "2"}
            fence = {"job_id": 1, "token": 1}
            for path, body in (
                ("/api/workers/heartbeat", beat),
                ("/api/workers/heartbeat", {"worker_id": "two"}),
                ("/api/v1/workers", {"name": "two"}),
                (f"/api/v1/workers/{worker}/beat", {"jobs": []}),
                (f"/api/v1/workers/{worker}/claim", {"wait": 5}),
                (f"/api/v1/workers/{worker}/turn", {"claim": 1}),
                (f"/api/v1/workers/{worker}/turn", {"claim": 1, "settle": [{**fence, "outcome": "succeeded"}]}),
                (f"/api/v1/workers/{worker}/start", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/progress", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/settle", {"jobs": [{**fence, "outcome": "succeeded"}]}),
                (f"/api/v1/workers/{worker}/release", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/drain", {}),
                (f"/api/v1/workers/{worker}/shutdown", {}),
                ("/api/v1/jobs", {"task": "resize"}),
                ("/api/v1/jobs/1/cancel", {}),
                ("/api/v1/jobs/retry", {"ids": [1]}),
                ("/api/v1/queues/pause", {}),
            ):
                answer = http.post(path, json=body)
                assert (path, answer.status_code, answer.headers["Retry-After"]) == (path, 503, "1")
                assert answer.json()["code"] == "ledger_unavailable"
            for path in ("/api/v1/workers", "/api/v1/jobs/1/result?wait=5", "/api/v1/events", "/metrics", "/jobs", "/"):
                assert http.get(path).status_code == 503, path
            with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as person:
                # Whoever logged in with a token of the ledger comes as far as the guard, and sees a page of words.
                answer = person.get("/jobs", headers={"Accept": "text/html", "Cookie": "unstuck_session=none"})
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
                assert answer.headers["Content-Type"].startswith("text/html")
                assert "The ledger cannot be used" in answer.text
            server.start()
            wait_for(lambda: http.post("/api/workers/heartbeat", json=beat).status_code == 200, "the ledger's return")
            # What it said of itself meanwhile was not written then, and is now.
            found = http.get(f"/api/v1/workers/{worker}").json()
            assert (found["state"], found["metadata"]) == ("active", {"version": "2"})
            assert "Traceback" not in served.said()
