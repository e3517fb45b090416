"""What workers over HTTP do is counted like what our own do."""

from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.acceptance.test_foreign_api import Worker, key, put
from tests.fleet import wait_for
from tests.web import serving

from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.policy import Policy
from unstuck.domain.retry import RetryRule
from unstuck.store.opening import ready_ledger
from unstuck.store.records import Turn


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("ready_pg_url"))


def test_jobs_of_foreign_workers_are_counted(url: str) -> None:
    def shows(client: httpx.Client, line: str) -> bool:
        return f"{line}\n" in client.get("/metrics").text

    env = {"UNSTUCK_HEARTBEAT_INTERVAL": "0.1s", "UNSTUCK_CHECK_INTERVAL": "0.1s"}
    with serving(url, env=env) as client:
        ledger = ready_ledger(Settings(url=url))
        try:
            for _ in range(3):
                put(ledger, "pictures")
            put(ledger, "pictures", Policy(retry=RetryRule(max_attempts=2)))
        finally:
            ledger.close()
        worker = Worker(client, "pictures")
        first, second, third, again = worker.claim(limit=4, start=True)
        settled = [{**key(job), "outcome": "succeeded"} for job in (first, second)]
        failed = {"outcome": "failed", "error": {"type": "IOError", "message": "no such file"}}
        answer = worker.call("settle", jobs=[*settled, {**key(third), **failed}, {**key(again), **failed}])
        assert answer.status_code == 200, answer.text
        lost = {"job_id": first["job_id"], "token": first["token"] + 1000}
        step = {"seq": 1, "name": "charge", "value": 1}
        for verb, more in (("settle", {"outcome": "succeeded"}), ("start", {}), ("progress", {}), ("steps", step)):
            assert worker.call(verb, jobs=[{**lost, **more}]).status_code == 409
        # One that was handed out here, and that the ledger took back since.
        with closing(ready_ledger(Settings(url=url))) as ledger:
            put(ledger, "pictures")
            [taken] = worker.claim(limit=1)
            ledger.turn(Turn(worker.id, release=(Release(taken["job_id"], taken["token"]),)))
        assert worker.call("settle", jobs=[{**key(taken), "outcome": "succeeded"}]).status_code == 409
        for line in (
            'unstuck_jobs_ended_total{queue="pictures",state="succeeded"} 2',
            'unstuck_jobs_ended_total{queue="pictures",state="failed"} 1',
            'unstuck_job_retries_total{code="TASK_FAILED",queue="pictures"} 1',
            'unstuck_job_wait_seconds_count{queue="pictures",task="resize"} 5',
            'unstuck_job_run_seconds_count{queue="pictures",task="resize"} 4',
            "unstuck_superseded_writes_total 5",
        ):
            wait_for(lambda line=line: shows(client, line), line)  # type: ignore[misc]
