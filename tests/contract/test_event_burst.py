"""Five hundred workers killed at once are one notification for each client, with the right count."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest
from tests.contract.victims import VICTIMS, Victim, kill_all, registered_victims
from tests.fleet import wait_for
from tests.web import opened

from unstuck import App, Event
from unstuck.config import Recovery
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger

GATHER = "3s"
"""Longer than a reaper on a busy machine pauses among five hundred burials."""


@pytest.fixture
def victims(ledger: Ledger) -> Iterator[list[Victim]]:
    with registered_victims(ledger) as victims:
        yield victims


def test_five_hundred_deaths_are_one_notification_for_each_client(
    ledger: Ledger, url: str, victims: list[Victim]
) -> None:
    with opened(url, env={"UNSTUCK_WEB_REAP": "false"}) as served:
        streams = [Stream(served.url) for _ in range(2)]
        app = App(url)
        local: list[Event] = []
        threading.Thread(target=lambda: local.extend(iter_first(app)), daemon=True).start()
        wait_for(lambda: all(stream.begun for stream in streams), "both streams to begin")
        wait_for(lambda: app._counter.parts().feed._wakes, "somebody who listens here")
        kill_all(victims)
        buried = Reaper(ledger, Recovery(), by="reaper").round(ticket=False).buried
        assert buried.total() == VICTIMS
        ledger.note_event("worker_stopped", "the end")
        for stream in streams:
            wait_for(lambda stream=stream: stream.kinds()[-1:] == ["worker_stopped"], "the end of the stream")
            assert stream.kinds() == ["worker_dead", "worker_stopped"]
            [news] = [event for event in stream.events if event["kind"] == "worker_dead"]
            assert (news["count"], len(news["first"])) == (VICTIMS, 5)
            assert news["message"].endswith("and 495 more")
        wait_for(lambda: local, "the listener in this process")
        assert local[0].count == VICTIMS
        app.close()


def iter_first(app: App) -> list[Event]:
    return [next(iter(app.events(["worker_dead"], gather=GATHER)))]


class Stream:
    """A client that listens over HTTP, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.begun = False
        self.events: list[dict[str, object]] = []
        self._url = url
        threading.Thread(target=self._listen, daemon=True).start()

    def kinds(self) -> list[str]:
        return [str(event["kind"]) for event in self.events]

    def _listen(self) -> None:
        path = f"{self._url}/api/v1/events?kind=worker_dead,worker_stopped&gather={GATHER}"
        with httpx.Client(trust_env=False, timeout=60) as client, client.stream("GET", path) as response:
            try:
                for line in response.iter_lines():
                    self.begun = self.begun or line.startswith("id:")
                    if line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
            except httpx.HTTPError:
                pass  # The server ended with the test.
