"""A broker looks for dead workers and keeps the schedules from its start, before any peer came."""

from pathlib import Path

import pytest
from tests.http.test_serve_watches import is_dead, killed_worker
from tests.mdp.broker import broker_on
from tests.support.fleet import wait_for

from unstuck import App
from unstuck.config import Settings
from unstuck.ledger.open import ready_ledger


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_broker_that_was_started_again_watches_and_schedules_before_anyone_calls_it(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    with broker_on(request, tmp_path, dialect) as broker:
        ledger = ready_ledger(Settings(url=broker.url))
        try:
            killed_worker(ledger, "killed")
            app = App(broker.url)
            app.operator.schedules.create("often", "add", every="1s", args=[1, 2])
            app.close()
            broker.again()
            wait_for(lambda: is_dead(ledger, "killed"), "the killed Python worker to be found")
            wait_for(lambda: ledger.jobs.count(), "the schedule to fire")
        finally:
            ledger.close()
