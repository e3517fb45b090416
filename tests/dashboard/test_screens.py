"""Every screen on both databases, and what is said where there is nothing to show."""

import html
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect
from tests.contract.test_failure_rates import ended
from tests.support.browser import looking, wait_live
from tests.support.builders import birth
from tests.support.cli import RETRIED, Cli
from tests.support.fleet import wait_for
from tests.support.http_server import Served, serve
from tests.support.workflows import opened_app

from unstuck.client.operator import Operator
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.limits import read_limit
from unstuck.domain.liveness import Detector
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.workers import Turn

SCREENS = ("/", "/jobs", "/workflows", "/workers", "/queues", "/quarantine", "/events", "/doctor", "/upkeep", "/audit")


def test_every_screen_shows_what_is_there(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    failed, running, *_ = shop.jobs(4)
    shop.fail(shop.claim(start=True)[0], "the card was declined")
    shop.claim(start=True)
    shop.worker("w2", "grace")
    shop.report_death("w2")
    with serve(shop.url) as served:
        for path in (*SCREENS, f"/jobs/{failed}", f"/jobs/{running}", "/workers/w1", "/workers/w2"):
            assert served.client.get(path).status_code == 200, path
        assert "its process no longer exists" in served.client.get("/").text.lower()
        assert "the card was declined" in served.client.get("/jobs?state=failed").text
        narrowed = served.client.get("/jobs?state=running&queue=default&task=add&newer=1h").text
        assert f'href="/jobs/{running}"' in narrowed
        assert f'href="/jobs/{failed}"' not in narrowed
        found = served.client.get(f"/jobs?id=%23{failed}")
        assert (found.status_code, found.headers["location"]) == (303, f"/jobs/{failed}")


def test_an_empty_ledger_has_a_friendly_word_on_every_screen(shop: Cli) -> None:
    with serve(shop.url) as served:
        for path in SCREENS:
            answer = served.client.get(path)
            assert answer.status_code == 200, path
            assert path == "/doctor" or 'class="empty"' in answer.text, path


FAILURES = [
    (2_000, 0, "problem", "2,000 of 2,000 jobs of task 'add' failed in the last hour (100 %)."),
    (30, 70, "warning", "30 of 100 jobs of task 'add' failed in the last hour (30 %)."),
    (10, 90, "good", "Everything is all right."),
]


@pytest.mark.parametrize(("failed", "succeeded", "level", "sentence"), FAILURES)
def test_the_headline_speaks_of_jobs_that_fail(
    shop: Cli, failed: int, succeeded: int, level: str, sentence: str
) -> None:
    with shop.ledger() as ledger:
        ledger.workers.register(
            birth("w1", heartbeat_interval_s=600.0, suspect_after_s=3600.0, running_stale_after_s=3600.0)
        )
        ledger.maintenance.take_ticket("sweep", 3600.0)
        ended(ledger, "add", failed, succeeded)
    with serve(shop.url, env={"UNSTUCK_HTTP_REAP": "false"}) as served:

        def is_told() -> bool:
            page = html.unescape(served.client.get("/").text)
            assert "no worker" not in page.lower()
            return f'class="health {level}"' in page and f'<p class="health-line">{sentence}</p>' in page

        wait_for(is_told, sentence)


def test_what_does_not_exist_is_a_screen_for_people_and_a_problem_for_programs(shop: Cli) -> None:
    with serve(shop.url) as served:
        for path in ("/jobs/4711", "/jobs/x", "/workers/nobody", "/nowhere"):
            shown = served.client.get(path, headers={"Accept": "text/html"})
            assert (shown.status_code, shown.headers["content-type"][:9]) == (404, "text/html"), path
            told = served.client.get(path)
            assert (told.status_code, told.json()["code"]) == (404, "not_found"), path
        wrong = served.client.get("/jobs?older=soon", headers={"Accept": "text/html"})
        assert wrong.status_code == 200
        assert "must be a duration" in wrong.text


WINDOW_AT_TWICE_THE_SIZE: ViewportSize = {"width": 640, "height": 450}
PHONE: ViewportSize = {"width": 390, "height": 844}
EVIL = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, list[str]]]:
    """A ledger in which everybody writes scripts into everything, and the paths of all screens."""
    folder = tmp_path_factory.mktemp("shop")
    shop = Cli(f"sqlite:///{folder}/jobs.db", folder)
    shop.worker("w1", "ada")
    evil = evil_worker(shop)
    failed, running, quarantined = evil_jobs(shop)
    shop.jobs(queue="nobody")
    evil_order(shop)
    shop.worker("long", "x" * 200, queues=("q" * 200,))
    shop.worker("w2", "grace")
    shop.report_death("w2")
    paths = ["/jobs", "/", "/jobs?state=failed&queue=x&older=1m", "/workers", "/queues", "/quarantine", "/events"]
    paths += ["/doctor", "/upkeep", "/audit", f"/workers/{evil}", "/workers/w2", "/workers/long", "/schedules"]
    paths += ["/workflows", *(f"/workflows/{number}" for number in evil_workflows(shop))]
    paths += [f"/jobs/{job_id}" for job_id in (failed, running, quarantined)]
    with serve(shop.url, env={"UNSTUCK_HTTP_REDACT": "pin"}) as served:
        yield served, paths


def evil_worker(shop: Cli) -> str:
    worker = birth(
        "evil",
        name=f"w {EVIL}",
        pid=1,
        boot_id="b",
        pid_namespace="n",
        process_started="s",
        queues=("default", EVIL),
        tasks=(),
        concurrency=2,
        version="1",
        heartbeat_interval_s=5.0,
        suspect_after_s=30.0,
        running_stale_after_s=30.0,
        metadata={"zone": EVIL, "token": "hidden too"},
    )
    with shop.ledger() as ledger:
        ledger.workers.register(worker)
    return "evil"


def evil_jobs(shop: Cli) -> tuple[int, int, int]:
    """Give a failed one, a running one and a quarantined one, all with scripts wherever there is room."""
    payload = b'{"args":["%s"],"kwargs":{"<b>":"%s","password":"hunter2","Pin-Code":"4711"}}' % (
        (EVIL.replace('"', "'").encode(),) * 2
    )
    ids = []
    for state in (JobState.FAILED, None, JobState.QUARANTINED):
        ids += shop.jobs(payload=payload, policy=RETRIED, unique_key=None, enqueued_by=EVIL)
        (held,) = shop.claim("w1", start=True)
        autopsy = Autopsy(DeathKind.SIGNAL, f"killed {EVIL}", Detector.RUNNER, stack=EVIL, stdout=EVIL, stderr=EVIL)
        if state is not None:
            ending = Ending(
                held.job_id,
                held.token,
                state,
                AttemptState.CRASHED,
                error=JobError("WORKER_CRASHED", EVIL, f"killed {EVIL}", {"traceback": EVIL}),
                counter="crash",
                event=state.value,
                message=f"WORKER_CRASHED: killed {EVIL}",
                autopsy=autopsy,
            )
            with shop.ledger() as ledger:
                assert not ledger.workers.turn(Turn("w1", endings=(ending,))).superseded
    return ids[0], ids[1], ids[2]


def evil_order(shop: Cli) -> None:
    """Make schedules in every state, a limited queue, and a line that is full."""
    shop.jobs(2, queue="nobody", more=JobExtras(concurrency_key=f"key {EVIL}", concurrency_limit=1))
    with shop.ledger() as ledger:
        operator = Operator(ledger, shop.settings, by=EVIL)
        operator.schedules.create("open", "add", every="1h")
        paused = operator.schedules.create("p" * 200, "add", cron="1-59/7 */2 1,15 6 *", tz="Europe/Berlin")
        operator.schedules.pause(paused.name)
        left = ScheduleDefinition("left", "gone", "default", paused.timing, paused.job)
        ledger.schedules.know([left], "app")
        operator.queues.limit("nobody", read_limit(5, "100/m"))


def evil_workflows(shop: Cli) -> tuple[int, int]:
    """Give one that goes on and one that failed, with nodes of every kind and in every state."""
    with opened_app(shop) as (app, add):
        going = app.workflow(f"w {EVIL}"[:200])
        wide = [going.add(add, number) for number in range(12)]
        group = going.group(f"g {EVIL}"[:200])
        group.map(add, group.add(add, *wide)).named(f"m {EVIL}"[:200])
        going.add(add, group).named("x" * 200)
        failed = going.start().id
        shop.fail(shop.claim("w1", start=True)[0], EVIL)
        return going.start(again=True).id, failed


@pytest.mark.long
def test_no_serious_trouble_for_whoever_uses_a_screen_reader_in_light_and_in_dark(
    browser: Browser, screens: tuple[Served, list[str]]
) -> None:
    served, paths = screens
    axe = Axe().axe_script
    with looking(browser, served.url, color_scheme="light") as page:
        # The first and the last are like others among them.
        for path in paths[1:-1]:
            page.goto(path)
            page.evaluate(axe)
            assert not troubles(page, {}), path
            page.emulate_media(color_scheme="dark")
            # Only colours differ.
            assert not troubles(page, {"runOnly": ["color-contrast"]}), path
            page.emulate_media(color_scheme="light")


def troubles(page: Page, options: dict[str, Any]) -> list[tuple[str, str]]:
    run = "options => axe.run(document, options)"
    found = page.evaluate(run, {"resultTypes": ["violations"], **options})["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.mark.long
def test_nothing_scrolls_sideways_in_a_window_at_twice_the_size_and_on_a_phone(
    browser: Browser, screens: tuple[Served, list[str]]
) -> None:
    served, paths = screens
    with looking(browser, served.url) as page:
        for path in paths:
            page.set_viewport_size(WINDOW_AT_TWICE_THE_SIZE)
            page.goto(path)
            for size in (WINDOW_AT_TWICE_THE_SIZE, PHONE):
                page.set_viewport_size(size)
                assert page.evaluate("innerWidth") == size["width"]
                over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert over <= 0, (path, size, over)


def test_a_name_of_two_hundred_letters_leaves_its_neighbours_in_sight(
    browser: Browser, screens: tuple[Served, list[str]]
) -> None:
    served, _ = screens
    with looking(browser, served.url) as page:
        page.set_viewport_size({"width": 1280, "height": 800})
        for path in ("/", "/queues", "/workers"):
            page.goto(path)
            hidden = "[...document.querySelectorAll('.scroll')].map(one => one.scrollWidth - one.clientWidth)"
            assert max(page.evaluate(hidden)) <= 0, path


def test_nothing_that_a_job_wrote_is_obeyed(browser: Browser, screens: tuple[Served, list[str]]) -> None:
    served, paths = screens
    with looking(browser, served.url) as page:
        for path in paths:
            page.goto(path)
            assert_harmless(page, path)
        page.goto(paths[-1])
        wait_live(page)
        # Live fragments take another way into the page.
        page.wait_for_timeout(1_200)
        assert_harmless(page, "live")
        expect(page.locator(".args")).to_contain_text("<script>window.pwned")


def assert_harmless(page: Page, path: str) -> None:
    assert page.evaluate("window.pwned") is None, path
    assert page.locator("main script, main img").count() == 0, path


def test_secrets_among_arguments_are_hidden(screens: tuple[Served, list[str]]) -> None:
    served, paths = screens
    shown = served.client.get(paths[-1]).text
    assert "hunter2" not in shown
    assert "4711" not in shown
    assert shown.count("•••") == 2
    assert "hidden too" not in served.client.get("/workers/evil").text


COLOURS = "[getComputedStyle(document.documentElement).colorScheme, getComputedStyle(document.body).backgroundColor]"


def test_light_and_dark_follow_the_system(browser: Browser, screens: tuple[Served, list[str]]) -> None:
    served, _ = screens
    with looking(browser, served.url, color_scheme="light") as page:
        page.goto("/queues")
        light = page.evaluate(COLOURS)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(COLOURS)
    assert (light[0], dark[0]) == ("light", "dark")
    assert light[1] != dark[1]


def test_an_outage_is_told_on_the_page_and_over_http(either_shop: Cli) -> None:
    either_shop.worker()
    with either_shop.ledger() as ledger:
        ledger.recovery.tick(Tick(None, 0.0, cause=Cause.START))
        # Nobody reaches it for longer than a reaper that just started takes for the watch of others.
        wait_for(lambda: ledger.recovery.tick(Tick(None, 0.0, cause=Cause.OUTAGE)).began is Cause.OUTAGE, "the outage")
    with serve(either_shop.url) as served:
        findings = {one["code"]: one for one in served.client.get("/api/v1/doctor").json()}
        assert findings["ledger-outage"]["facts"]["cause"] == "outage"
        page = wait_for(lambda: "ledger-outage" in (text := served.client.get("/doctor").text) and text, "the doctor")
        assert "The ledger could not be reached." in page
