"""What the doctor finds is on the dashboard and in the HTTP API, on both databases."""

from tests.acceptance.shop import Shop
from tests.fleet import wait_for
from tests.web import opened

from unstuck.domain.watch import Cause, Tick


def test_an_outage_is_told_on_the_page_and_over_http(either_shop: Shop) -> None:
    either_shop.worker()
    with either_shop.ledger() as ledger:
        ledger.tick(Tick(None, 0.0, cause=Cause.START))
        # Nobody reaches it for longer than a reaper that just started takes for the watch of others.
        wait_for(lambda: ledger.tick(Tick(None, 0.0, cause=Cause.OUTAGE)).began is Cause.OUTAGE, "the outage")
    with opened(either_shop.url) as served:
        findings = {one["code"]: one for one in served.client.get("/api/v1/doctor").json()}
        assert findings["ledger-outage"]["facts"]["cause"] == "outage"
        page = wait_for(lambda: "ledger-outage" in (text := served.client.get("/doctor").text) and text, "the doctor")
        assert "The ledger could not be reached." in page
