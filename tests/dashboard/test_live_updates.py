"""The page while the fleet dies: what is killed is shown with its cause, without a reload."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.support.browser import looking, wait_live
from tests.support.fleet import Fleet, wait_for
from tests.support.http_server import Served, serve
from tests.support.server_fixtures import NO_REAPER

from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import NewJob

KEEP_WHAT_IS_HEARD = """
window.heard = [];
window.EventSource = class extends window.EventSource {
  constructor(address) {
    super(address);
    this.addEventListener("message", (event) => window.heard.push(event.data));
  }
};
"""
"""Added to a page before its own scripts: a test knows what the server has sent."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    # No sweep comes in between: a death is seen by the neighbours of the worker.
    fleet = Fleet(f"sqlite:///{folder}/jobs.db", folder, heartbeat_interval="1s", check_interval="10m")
    fleet.start("--name", "stays")
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Iterator[Served]:
    with serve(fleet.url, env=NO_REAPER) as served:
        yield served


def test_a_killed_worker_is_shown_with_its_cause_without_a_reload(
    browser: Browser, fleet: Fleet, served: Served
) -> None:
    started = [fleet.start("--name", f"doomed-{number}", wait=False) for number in range(3)]
    for worker in started:
        fleet.wait_active(worker)
    job = fleet.task("nap").enqueue(600)
    fleet.wait_running(job)
    with looking(browser, served.url) as page:
        page.goto("/")
        wait_live(page)
        page.evaluate("window.neverReloaded = true")
        expect(page.locator(".tile")).to_have_count(4)
        expect(page.locator("#tiles")).to_contain_text(f"#{job.id}")
        for victim in started[1:]:
            record = victim.record()
            assert record is not None
            victim.kill()
            death = page.locator("#deaths li", has_text=record.name)
            death.wait_for()
            expect(death).to_contain_text("Its process no longer exists")
            expect(death).to_contain_text("seen by neighbour")
            expect(page.locator(".tile", has_text=record.name)).to_have_count(0)
        assert page.evaluate("window.neverReloaded") is True


def test_a_worker_says_how_much_memory_its_processes_use(fleet: Fleet, served: Served) -> None:
    worker = fleet.ledger.workers.list(living_only=True)[0]
    assert worker.metadata["memory_bytes"] > 10_000_000
    for path in (f"/workers/{worker.id}", "/workers"):
        assert re.search(r"Memory.*\d (MB|GB)", served.client.get(path).text, re.DOTALL), path


def test_what_dies_in_a_runner_is_shown_with_its_signal(browser: Browser, fleet: Fleet, served: Served) -> None:
    with looking(browser, served.url) as page:
        page.goto("/")
        wait_live(page)
        job = fleet.task("die").enqueue("segfault")
        fleet.wait_state(job, JobState.FAILED)
        death = page.locator("#deaths li", has_text="Runner of die")
        expect(death).to_contain_text("Killed by SIGSEGV")
        death.get_by_role("link", name=f"#{job.id}").click()
        expect(page.get_by_role("heading", name="Autopsy of try 1")).to_be_visible()
        expect(page.locator("pre", has_text="string_at").first).to_be_visible()


def test_a_job_that_seems_to_hang_is_asked_where_it_stands(browser: Browser, fleet: Fleet, served: Served) -> None:
    job, _ = fleet.begin("nap", 600)
    with looking(browser, served.url) as page:
        page.goto(f"/jobs/{job.id}")
        wait_live(page)
        page.get_by_role("button", name="Where does it stand?").click()
        expect(page.get_by_text("Its worker was asked")).to_be_visible()
        expect(page.locator("section", has_text="Where it stood").locator("pre").first).to_contain_text("in nap")
        assert fleet.state(job) is JobState.RUNNING
    said = served.client.post(f"/api/v1/jobs/{job.id}/stack?wait=30").json()
    assert (said["kind"], said["job_id"]) == ("stack", job.id)
    assert "in nap" in said["message"]


def test_a_change_leaves_focus_and_selection_alone(browser: Browser, fleet: Fleet, served: Served) -> None:
    with looking(browser, served.url) as page:
        page.add_init_script(KEEP_WHAT_IS_HEARD)
        page.goto("/queues")
        wait_live(page)
        pause = page.get_by_role("button", name="Pause queue default")
        pause.focus()
        page.locator("tr", has_text="default").locator("th a").evaluate(
            "link => getSelection().selectAllChildren(link)"
        )
        fleet.ledger.jobs.enqueue([NewJob(task="add", queue="lonely", payload=b"{}", policy=b"")])
        # While text is marked nothing moves; then what was put off appears.
        wait_for(lambda: "lonely" in page.evaluate("window.heard.join()"), "the news to reach the page", every_s=0.1)
        assert page.evaluate("getSelection().toString()") == "default"
        page.evaluate("getSelection().removeAllRanges()")
        expect(page.locator("tr", has_text="lonely")).to_contain_text("No living worker serves it")
        expect(pause).to_be_focused()


def test_a_lost_connection_is_said_and_comes_back_by_itself(browser: Browser, served: Served) -> None:
    with looking(browser, served.url) as page:
        page.goto("/events")
        wait_live(page)
        served.process.send_signal(signal.SIGSTOP)
        try:
            expect(page.locator("#connection")).to_contain_text("Connection lost, since")
        finally:
            served.process.send_signal(signal.SIGCONT)
        expect(page.locator("#connection")).to_have_text("Live")


def test_a_server_that_ends_sends_its_viewers_home(fleet: Fleet) -> None:
    with serve(fleet.url) as served, served.client.stream("GET", "/live?room=overview") as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        served.process.send_signal(signal.SIGTERM)
        for _ in lines:
            pass
        served.process.wait(60)
        assert "graceful shutdown exceeded" not in served.said()
