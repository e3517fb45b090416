"""The operator's verbs on the page: with a mouse, with the keyboard alone, and without any script."""

from contextlib import closing
from functools import partial

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.support.browser import looking, wait_live
from tests.support.cli import Cli
from tests.support.http_server import Served, guarded_door

from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import JobFilter

QUEUES = ("default", "keys", "bulk")
"""Each test works in a queue of its own."""


def state_of(shop: Cli, job_id: int) -> JobState:
    with shop.ledger() as ledger:
        job = ledger.jobs.get(job_id)
    assert job is not None
    return job.state


def failed(shop: Cli, queue: str) -> int:
    (job_id,) = shop.jobs(queue=queue)
    shop.fail(shop.claim(start=True, queue=queue)[0], "the card was declined")
    return job_id


def test_a_failed_job_is_retried_from_its_page(browser: Browser, stand: Cli, served: Served) -> None:
    job_id = failed(stand, "default")
    with looking(browser, served.url) as page:
        page.goto("/jobs?state=failed")
        page.get_by_role("link", name=f"#{job_id}").click()
        expect(page.get_by_text("the card was declined").first).to_be_visible()
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("status").filter(has_text="queued again")).to_be_visible()
        expect(page.locator("h1")).to_contain_text("pending")
        page.reload()
        expect(page.get_by_text("queued again.")).to_have_count(0)
    assert state_of(stand, job_id) is JobState.PENDING


def test_many_jobs_are_cancelled_after_a_question(browser: Browser, stand: Cli, served: Served) -> None:
    ids = stand.jobs(3, queue="bulk")
    with looking(browser, served.url) as page:
        page.goto("/jobs?queue=bulk")
        cancel = page.get_by_role("button", name="Cancel chosen")
        expect(cancel).to_be_disabled()
        page.get_by_role("checkbox", name="Choose all jobs on this page").check()
        expect(page.locator("#chosen")).to_have_text("3 of 3 chosen")
        cancel.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Cancel the chosen jobs?")
        dialog.get_by_role("button", name="Keep things as they are").click()
        assert state_of(stand, ids[0]) is JobState.PENDING
        cancel.click()
        dialog.get_by_role("button", name="Cancel them").click()
        expect(page.get_by_text("3 jobs cancelled.")).to_be_visible()
    assert {state_of(stand, job_id) for job_id in ids} == {JobState.CANCELLED}


def test_everything_can_be_done_with_the_keyboard_alone(browser: Browser, stand: Cli, served: Served) -> None:
    stand.jobs(2, queue="keys")
    with looking(browser, served.url) as page:
        page.goto("/")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        tab_to(page, "Queues")
        page.keyboard.press("Enter")
        page.wait_for_url("**/queues")
        wait_live(page)
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # The skip link.
        tab_to(page, "Purge queue keys")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        expect(page.get_by_role("button", name="Keep things as they are")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Cancelled 2 pending jobs of queue 'keys'.")).to_be_visible()


def tab_to(page: Page, name: str, most: int = 60) -> None:
    """Press Tab until what has the focus is called so, and seen to have it."""
    for _ in range(most):
        page.keyboard.press("Tab")
        here = page.evaluate("(e => e.getAttribute('aria-label') || e.innerText.trim())(document.activeElement)")
        if here == name:
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"no Tab reached {name!r}")


def test_without_any_script_the_server_asks(browser: Browser, stand: Cli, served: Served) -> None:
    (job_id,) = stand.jobs(queue="default")
    with looking(browser, served.url, java_script_enabled=False) as page:
        page.goto(f"/jobs/{job_id}")
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("heading", name=f"Cancel job {job_id}?")).to_be_visible()
        assert state_of(stand, job_id) is JobState.PENDING
        page.get_by_role("button", name="Cancel the job").click()
        expect(page.get_by_text(f"Job {job_id}: cancelled.")).to_be_visible()
        assert page.url.endswith(f"/jobs/{job_id}")
    assert state_of(stand, job_id) is JobState.CANCELLED


def test_all_that_a_filter_finds_is_retried(browser: Browser, stand: Cli, served: Served) -> None:
    ids = [failed(stand, "bulk") for _ in range(2)]
    with looking(browser, served.url) as page:
        page.goto("/jobs?state=failed&queue=bulk")
        page.get_by_role("button", name="Retry all that match…").click()
        expect(page.get_by_role("heading", name="Retry all failed jobs of queue 'bulk'?")).to_be_visible()
        page.get_by_role("button", name="Retry them").click()
        expect(page.get_by_text("2 jobs queued again.")).to_be_visible()
    assert {state_of(stand, job_id) for job_id in ids} == {JobState.PENDING}


def test_every_verb_of_the_command_line_is_there(stand: Cli, served: Served) -> None:
    """Each is done once, as a form without any browser, and says what it did."""
    asked = {
        "pause": ({"queue": "default"}, "Paused: default."),
        "resume": ({"queue": "default"}, "Resumed: default."),
        "disable": ({"worker": "w1", "reason": "hot"}, "is disabled"),
        "enable": ({"worker": "w1"}, "is enabled."),
        "drain": ({"worker": "w1"}, "was asked to drain"),
        "stop": ({"worker": "w1"}, "was asked to stop"),
        "fail-stale": ({"older_than": "1h"}, "Failed 0 stale jobs."),
        "requeue-stale": ({"older_than": "1h"}, "Gave back 0 stale jobs."),
        "prune": ({"older_than": "1h", "state": "succeeded"}, "Removed 0 finished jobs."),
        "retry": ({"job": "999999"}, "not there any more"),
        "purge": ({"queue": "nowhere"}, "There is no queue"),
    }
    for verb, (fields, said) in asked.items():
        form = {"back": "/queues?x=1", "confirmed": "yes", **fields}
        answer = served.client.post(f"/verbs/{verb}", data=form, headers={"Origin": served.url})
        assert answer.status_code == 303, (verb, answer.text)
        assert answer.headers["location"] == "/queues?x=1"
        assert said in served.client.get("/queues").text.replace("&#39;", "'"), verb
    with stand.ledger() as ledger:
        assert ledger.jobs.list(JobFilter(states=(JobState.QUARANTINED,))) == []


@pytest.mark.parametrize("number", ["9" * 5_000, "99999999999999999999", "0", "-1", "1e3", "x"])
def test_what_is_no_number_of_a_job_does_nothing(served: Served, number: str) -> None:
    form = {"back": "/jobs", "job": number}
    answer = served.client.post("/verbs/retry", data=form, headers={"Origin": served.url})
    assert answer.status_code == 303
    assert "No jobs were chosen" in served.client.get("/jobs").text


def test_a_form_cannot_send_anybody_elsewhere(served: Served) -> None:
    for back in ("https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)"):
        form = {"back": back, "queue": "default"}
        answer = served.client.post("/verbs/pause", data=form, headers={"Origin": served.url})
        assert answer.headers["location"] == "/", back


def test_the_form_of_another_website_is_refused_with_the_login_of_its_victim(browser: Browser, shop: Cli) -> None:
    shop.worker()
    with guarded_door(shop.url) as door, closing(browser.new_context(base_url=door.url)) as victim:
        page = victim.new_page()
        page.goto("/login")
        page.get_by_label("Token").fill(door.all)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("button", name="Log out")).to_be_visible()
        # To another site the cookie is not sent. It is sent to the same site, which another port is.
        for attacker in ("http://evil.example", "http://127.0.0.1:8080"):
            form = (
                f'<form method="post" action="{door.url}/verbs/pause"><input name="queue"><button>Win</button></form>'
            )
            page.route(f"{attacker}/", partial(Route.fulfill, content_type="text/html", body=form))
            page.goto(f"{attacker}/")
            with page.expect_response(f"{door.url}/verbs/pause") as answered:
                page.get_by_role("button", name="Win").click()
            assert answered.value.status == 403, attacker
            assert answered.value.request.all_headers()["origin"] == attacker
        assert {queue["paused"] for queue in door.ask("GET", "/api/v1/queues", door.all).json()} == {False}
        page.goto("/queues")
        page.get_by_role("button", name="Pause all").click()
        expect(page.get_by_text("Paused")).not_to_have_count(0)
        assert {queue["paused"] for queue in door.ask("GET", "/api/v1/queues", door.all).json()} == {True}
