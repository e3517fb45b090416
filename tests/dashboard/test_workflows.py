"""Workflows on the page: drawn, live, told in words, taken up again with a mouse and with the keyboard."""

from playwright.sync_api import Browser, expect
from tests.support.browser import looking, wait_live
from tests.support.cli import Cli
from tests.support.http_server import Served
from tests.support.workflows import end_workflows, start, start_mapped


def test_the_drawing_follows_the_workflow_without_a_reload(browser: Browser, stand: Cli, served: Served) -> None:
    number = start(stand)
    [held] = stand.claim(start=True)
    with looking(browser, served.url) as page:
        page.goto("/workflows")
        page.get_by_role("link", name=f"#{number} bills").click()
        wait_live(page)
        page.evaluate("window.neverReloaded = true")
        boxes = page.locator(".dag-box:not(.group)")
        expect(boxes).to_have_count(4)
        expect(page.locator(".dag-box.s-running")).to_contain_text("fetch")
        stand.fail(held, "the card was declined")
        expect(page.locator(".dag-box.task.s-failed")).to_contain_text("fetch")
        expect(page.locator("h1")).to_contain_text("failed")
        expect(page.locator(".failed-node")).to_contain_text("the card was declined")
        assert page.evaluate("window.neverReloaded")
        page.locator(".dag a").first.focus()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text(f"#{held.job_id}")
        page.get_by_role("link", name=f"#{number} bills").click()
        page.get_by_role("button", name="Retry from what failed").click()
        expect(page.get_by_role("status").filter(has_text="goes on from what failed")).to_be_visible()
        expect(page.locator(".dag-box.s-pending")).to_contain_text("fetch")
    stand.succeed(stand.claim(start=True)[0])


def test_going_on_and_giving_up_are_asked_about_first(browser: Browser, stand: Cli, served: Served) -> None:
    end_workflows(stand)
    number = start(stand, on_error="pause")
    stand.fail(stand.claim(start=True)[0])
    with looking(browser, served.url) as page:
        page.goto(f"/workflows/{number}")
        wait_live(page)
        page.get_by_role("button", name="Go on past it").click()
        page.get_by_role("dialog").get_by_role("button", name="Keep things as they are").click()
        expect(page.locator("h1")).to_contain_text("paused")
        page.get_by_role("button", name="Go on past it").click()
        # A new page comes, after the old one may have shown the change: who asks first must be there.
        with page.expect_navigation():
            page.get_by_role("dialog").get_by_role("button", name="Go on").click()
        expect(page.locator("h1")).to_contain_text("running")
        wait_live(page)
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel the workflow").click()
        expect(page.locator("h1")).to_contain_text("cancelled")


def test_a_map_is_one_box_with_its_counts(browser: Browser, stand: Cli, served: Served) -> None:
    end_workflows(stand)
    number = start_mapped(stand, items=30, bad=3)
    with looking(browser, served.url) as page:
        page.goto(f"/workflows/{number}")
        expect(page.locator(".dag-box.map")).to_contain_text("29 of 30")
        listed = page.locator("tbody tr", has_text="page is torn")
        expect(listed.first).to_contain_text("parse[3]")
        expect(page.locator("table")).to_contain_text("10 of them not listed")


def test_without_script_the_screen_asks_and_the_verb_works(served: Served, stand: Cli) -> None:
    end_workflows(stand)
    number = start(stand)
    for path in ("/workflows", f"/workflows/{number}", "/workflows?state=running", "/workflows?state=nonsense"):
        assert served.client.get(path).status_code == 200, path
    gone = served.client.get("/workflows/999999", headers={"Accept": "text/html"})
    assert (gone.status_code, "does not exist" in gone.text) == (404, True)
