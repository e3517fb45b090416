"""The live page: one look for all, none for nobody, no wait for slow readers; below another app it finds home."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from unstuck import App
from unstuck.errors import LedgerUnavailable
from unstuck.http import create_app
from unstuck.http.dashboard.live import LiveHub, Subscription, Viewer

OVERVIEW = Subscription("overview", "", "", True)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Any]:
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    app.migrate()
    door = create_app(app, open=True)
    yield door
    door.state.services.runtime.close()
    app.close()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def hear(viewer: Viewer) -> dict[str, str]:
    await viewer.news.wait()
    return viewer.take()


def test_many_viewers_cost_one_look_and_nobody_costs_none(door: Any) -> None:
    hub: LiveHub = door.state.hub

    async def watch() -> None:
        viewers = [hub.join(OVERVIEW) for _ in range(50)]
        heard = [await hear(viewer) for viewer in viewers]
        assert all("health" in fragments for fragments in heard)
        assert hub.looks == 1
        late = hub.join(OVERVIEW)
        assert "health" in late.take()
        for viewer in (*viewers, late):
            hub.leave(viewer)
        looks = hub.looks
        assert hub._task is not None
        await hub._task
        assert hub.looks <= looks + 1

    run(watch())


def test_who_does_not_read_keeps_only_the_newest_and_delays_nobody(door: Any) -> None:
    hub: LiveHub = door.state.hub

    async def watch() -> None:
        slow, quick = hub.join(OVERVIEW), hub.join(OVERVIEW)
        for number in range(1000):
            hub._tell({OVERVIEW: {"health": str(number)}})
        assert slow.waiting["health"] == "999"
        assert len(slow.waiting) <= 10
        assert (await hear(quick))["health"] is not None
        hub.leave(slow)
        hub.leave(quick)

    run(watch())


def test_what_did_not_change_is_not_sent_again(door: Any) -> None:
    hub: LiveHub = door.state.hub

    async def watch() -> None:
        viewer = hub.join(Subscription("quarantine", "", "", True))
        await hear(viewer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(viewer.news.wait(), 2.5)
        hub.leave(viewer)

    run(watch())


@pytest.mark.parametrize("trouble", [LedgerUnavailable("away"), ZeroDivisionError("a surprise")])
def test_who_looks_is_told_while_the_ledger_cannot_be_seen(
    door: Any, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    hub: LiveHub = door.state.hub

    def fail() -> None:
        raise trouble

    async def watch() -> None:
        viewer = hub.join(OVERVIEW)
        await hear(viewer)
        blind: list[bool] = [hub.stale_since is not None]
        with monkeypatch.context() as broken:
            broken.setattr(door.state.view.snapshots, "_ledger", fail)
            while True not in blind:
                await hear(viewer)
                blind.append(hub.stale_since is not None)
        while blind[-1] is True:
            await hear(viewer)
            blind.append(hub.stale_since is not None)
        hub.leave(viewer)
        assert (blind[0], True in blind) == (False, True)

    run(watch())


def test_below_another_app_every_link_leads_home(door: Any) -> None:
    outer = Starlette(routes=[Mount("/ops/jobs", app=door)])

    async def follow() -> None:
        transport = httpx.ASGITransport(outer, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642") as client:
            shown = (await client.get("/ops/jobs/")).text
            links = set(re.findall(r'(?:href|src|formaction|action|data-live)="([^"#]+)"', shown))
            assert len(links) > 10
            assert all(link.startswith("/ops/jobs/") for link in links), links
            for link in links:
                if "/live" not in link:
                    answer = await client.get(link.replace("&amp;", "&"))
                    assert answer.status_code == 200, link
            form = {"back": "/queues", "queue": ""}
            origin = {"Origin": "http://127.0.0.1:8642"}
            done = await client.post("/ops/jobs/verbs/pause", data=form, headers=origin)
            assert done.headers["location"] == "/ops/jobs/queues"

    run(follow())


def test_what_a_worker_says_of_its_settings_is_redacted_too(door: Any) -> None:
    async def look() -> None:
        transport = httpx.ASGITransport(door, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642") as client:
            metadata = {"api_key": "hunter1", "settings": {"password": "hunter2", "kept": "plain"}}
            beat = {"worker_id": "talkative", "metadata": metadata}
            worker_id = (await client.post("/api/workers/heartbeat", json=beat)).json()["id"]
            shown = (await client.get(f"/workers/{worker_id}")).text
            assert "plain" in shown
            assert "hunter" not in shown

    run(look())


def test_the_list_counts_the_jobs_of_a_foreign_worker_before_its_next_beat(door: Any) -> None:
    async def look() -> None:
        transport = httpx.ASGITransport(door, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642") as client:
            known = {"name": "resizer", "queues": ["images"], "tasks": [{"name": "resize"}], "concurrency": 7}
            worker_id = (await client.post("/api/v1/workers", json=known)).json()["id"]
            await client.post("/api/v1/jobs", json={"task": "resize", "queue": "images"})
            own = f"/api/v1/workers/{worker_id}"
            [job] = (await client.post(f"{own}/claim", json={"limit": 1, "have": []})).json()["jobs"]
            await client.post(f"{own}/start", json={"jobs": [{"job_id": job["job_id"], "token": job["token"]}]})
            shown = (await client.get("/workers")).text
            assert ">1/7<" in shown
            assert ":0</td>" not in shown

    run(look())
