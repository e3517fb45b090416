"""Schedules, limits of queues and lines on the page: shown as they are, changed with a mouse, asked about first."""

from playwright.sync_api import Browser, expect
from tests.support.browser import looking, wait_live
from tests.support.cli import Cli
from tests.support.http_server import Served

from unstuck.client.operator import Operator
from unstuck.domain.limits import read_limit
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.schedules import ScheduleRecord

QUEUES = ("default", "scrapes")


def schedules(shop: Cli) -> dict[str, ScheduleRecord]:
    with shop.ledger() as ledger:
        return {record.name: record for record in ledger.schedules.list()}


def test_a_schedule_is_shown_stopped_run_and_removed(browser: Browser, stand: Cli, served: Served) -> None:
    with looking(browser, served.url) as page:
        page.goto("/schedules")
        expect(page.get_by_text("No schedules yet")).to_be_visible()
        wait_live(page)
        page.evaluate("window.neverReloaded = true")
        with stand.ledger() as ledger:
            operator = Operator(ledger, stand.settings, by="ada")
            operator.schedules.create("nightly-report", "add", cron="30 3 * * 1", tz="Europe/Berlin", args=(1, 2))
        row = page.locator("tbody tr", has_text="nightly-report")
        expect(row).to_contain_text("At 03:30 on Monday")
        expect(row).to_contain_text("30 3 * * 1 in Europe/Berlin")
        expect(row).to_contain_text("in queue default")
        expect(row).to_contain_text("1 worker may fire it")
        assert page.evaluate("window.neverReloaded")
        row.get_by_role("button", name="Pause schedule nightly-report").click()
        expect(page.get_by_role("status").filter(has_text="'nightly-report' is paused")).to_be_visible()
        expect(row.locator(".state")).to_have_text("paused")
        expect(row).to_contain_text("Paused by")
        assert schedules(stand)["nightly-report"].paused
        row.get_by_role("button", name="Resume").click()
        expect(row.locator(".state")).to_have_text("open")
        assert not schedules(stand)["nightly-report"].paused
        row.get_by_role("button", name="Run now").click()
        expect(page.get_by_role("status").filter(has_text="runs now, beside its ticks")).to_be_visible()
        # It is a new page: who asks first must be there.
        wait_live(page)
        row.get_by_role("button", name="Remove").click()
        page.get_by_role("dialog").get_by_role("button", name="Keep things as they are").click()
        assert "nightly-report" in schedules(stand)
        row.get_by_role("button", name="Remove").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove it").click()
        expect(page.get_by_text("No schedules yet")).to_be_visible()
        page.goto("/audit")
        for verb in ("pause", "resume", "run", "remove"):
            row = page.locator("tr", has_text="schedule nightly-report").filter(has_text=verb)
            expect(row.first).to_be_visible()
    assert not schedules(stand)


def test_a_schedule_that_no_worker_knows_says_so(served: Served, stand: Cli) -> None:
    with stand.ledger() as ledger:
        operator = Operator(ledger, stand.settings, by="ada")
        made = operator.schedules.create("left-over", "add", every="1h")
        assert made.timing == Timing(every_s=3600.0)
        operator.schedules.remove("left-over")
        definition = ScheduleDefinition("left-over", "add", "default", made.timing, made.job)
        ledger.schedules.know([definition], "app")
    shown = served.client.get("/schedules").text
    assert "No living worker knows it" in shown
    assert "Every 1h" in shown


def test_the_limit_of_a_queue_is_set_shown_and_taken_back(browser: Browser, stand: Cli, served: Served) -> None:
    stand.jobs(3)
    with looking(browser, served.url) as page:
        page.goto("/queues")
        page.locator("select[name=queue]").select_option("default")
        page.get_by_label("At once").first.fill("1")
        page.get_by_label("Rate").fill("2/h")
        page.get_by_role("button", name="Set limit").click()
        expect(page.get_by_role("status").filter(has_text="'default': 1 at once, 2/h")).to_be_visible()
        limit = page.locator("tbody tr", has_text="default").locator("td[data-label=Limit]")
        expect(limit).to_contain_text("0 of 1")
        expect(limit).to_contain_text("at most 2/h")
        wait_live(page)
        (first,) = stand.claim(start=True)
        expect(limit).to_contain_text("1 of 1, full")
        stand.succeed(first)
        stand.succeed(stand.claim(start=True)[0])
        expect(limit).to_contain_text("the next may go in")
        page.get_by_label("Rate").fill("often")
        page.get_by_role("button", name="Set limit").click()
        expect(page.locator(".flash.problem")).to_contain_text("rate must be written as")
        # It is a new page: who asks first must be there.
        wait_live(page)
        page.get_by_role("button", name="No limit").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove the limit").click()
        expect(limit).to_contain_text("none")
        page.get_by_role("button", name="As its app says").click()
        expect(page.get_by_role("status").filter(has_text="takes its limit from its app again")).to_be_visible()
    with stand.ledger() as ledger:
        assert not [one for one in ledger.queues.limits() if one.limited_by or one.limit != read_limit(None, None)]


def test_a_full_line_is_shown_with_its_holder_and_widened(browser: Browser, stand: Cli, served: Served) -> None:
    ids = stand.jobs(3, queue="scrapes", more=JobExtras(concurrency_key="customer:42", concurrency_limit=1))
    with looking(browser, served.url) as page:
        page.goto("/queues")
        wait_live(page)
        row = page.locator("#line-rows tbody tr", has_text="customer:42")
        expect(row.get_by_role("link", name=f"#{ids[0]}")).to_be_visible()
        expect(row.locator("td[data-label=Wait]")).to_have_text("2")
        page.get_by_label("Key").fill("customer:42")
        page.get_by_label("At once").last.fill("2")
        page.get_by_role("button", name="Set places").click()
        expect(row.get_by_role("link", name=f"#{ids[1]}")).to_be_visible()
        expect(row.locator("td[data-label=Wait]")).to_have_text("1")
        row.get_by_role("button", name="As its jobs say").click()
        expect(page.get_by_role("status").filter(has_text="takes its limit from what is enqueued")).to_be_visible()


def test_without_script_the_server_asks_before_it_removes(browser: Browser, stand: Cli, served: Served) -> None:
    with stand.ledger() as ledger:
        Operator(ledger, stand.settings, by="ada").schedules.create("hourly", "add", every="1h")
    with looking(browser, served.url, java_script_enabled=False) as page:
        page.goto("/schedules")
        page.get_by_role("button", name="Remove schedule hourly").click()
        expect(page.get_by_role("heading", name="Remove schedule 'hourly'?")).to_be_visible()
        page.get_by_role("button", name="Remove it").click()
        expect(page.get_by_text("Schedule 'hourly' is removed.")).to_be_visible()
    assert "hourly" not in schedules(stand)
