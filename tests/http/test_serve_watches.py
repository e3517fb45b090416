"""Whatever serves the ledger also looks for the dead, from its start: nobody has to call it first."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tests.support.backdoor import backdoor_of
from tests.support.builders import birth
from tests.support.fleet import wait_for
from tests.support.http_server import Worker, fall_silent, put, serving, state
from tests.support.sqlite import ready_sqlite

from unstuck import App
from unstuck.config import Settings
from unstuck.domain.states import JobState, WorkerState
from unstuck.http import create_app
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import ready_ledger

QUICK = {"UNSTUCK_CHECK_INTERVAL": "0.1"}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ready_sqlite(tmp_path) if request.param == "sqlite" else str(request.getfixturevalue("ready_pg_url"))


def killed_worker(ledger: Ledger, worker_id: str) -> None:
    """Write down a worker of this host whose process is gone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ledger.workers.register(
        birth(worker_id, pid=ended.pid, process_started="1", suspect_after_s=600.0, heartbeat_interval_s=5)
    )


def is_dead(ledger: Ledger, worker_id: str) -> bool:
    return any(one.id == worker_id and one.state is WorkerState.DEAD for one in ledger.workers.list())


def test_a_server_that_was_restarted_finds_the_dead_before_anyone_calls_it(url: str) -> None:
    ledger = ready_ledger(Settings(url=url))
    try:
        with serving(url, env=QUICK) as client:
            job = put(ledger, "pictures")
            worker = Worker(client, "pictures")
            assert worker.claim(limit=1)
        assert state(ledger, job) is JobState.CLAIMED
        killed_worker(ledger, "killed")
        app = App(url)
        app.operator.schedules.create("often", "resize", every="1s", args=["a.png"])
        app.close()
        with serving(url, env=QUICK):
            wait_for(lambda: is_dead(ledger, "killed"), "the killed Python worker to be found")
            fall_silent(ledger, backdoor_of(url), worker.id)
            wait_for(lambda: state(ledger, job) is JobState.PENDING, "its job to be back in the queue")
            # An operator's schedule is kept as well: no worker is left to keep it.
            wait_for(lambda: sum(ledger.jobs.count().values()) > 1, "the schedule to fire")
    finally:
        ledger.close()


def test_a_server_that_must_not_reap_leaves_everyone_alone(tmp_path: Path) -> None:
    url = ready_sqlite(tmp_path)
    ledger = ready_ledger(Settings(url=url))
    try:
        killed_worker(ledger, "killed")
        with serving(url, env={**QUICK, "UNSTUCK_HTTP_REAP": "false"}) as client:
            before = client.get("/api/v1/workers").json()
            assert client.post("/api/workers/heartbeat", json={"worker_id": "other"}).status_code == 200
            assert not is_dead(ledger, "killed"), before
    finally:
        ledger.close()


@pytest.mark.parametrize("own_lifespan", [True, False], ids=["as the whole app", "mounted"])
def test_an_app_that_carries_the_door_watches_too(tmp_path: Path, own_lifespan: bool) -> None:
    url = ready_sqlite(tmp_path)
    ledger = ready_ledger(Settings(url=url))
    door = create_app(url, open=True)
    try:
        killed_worker(ledger, "killed")

        def found() -> None:
            wait_for(lambda: is_dead(ledger, "killed"), "the killed Python worker to be found")

        async def carried() -> None:
            if own_lifespan:
                async with door.router.lifespan_context(door):
                    await asyncio.to_thread(found)
                return
            # A mounted app is told of no start: the first request, whatever it asks for, is the start.
            outer = FastAPI()
            outer.mount("/ops", door)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://localhost") as client:
                assert (await client.get("/ops/healthz")).status_code == 200
                await asyncio.to_thread(found)

        asyncio.run(carried())
    finally:
        door.state.services.runtime.close()
        ledger.close()
