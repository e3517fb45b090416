"""Monitors, the doctor and alerts judge by one set of rules: what is a problem for one is a problem for all."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.contract.test_failure_rates import ended
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, failure, put, running, turn
from tests.support.doctor import CALM

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import gather
from unstuck.client.doctor.health import quick_health
from unstuck.config import Alerts
from unstuck.domain.conditions import Code
from unstuck.ledger.contract import Ledger
from unstuck.notify.alerts.conditions import AlertKind, find_conditions
from unstuck.notify.failures import look_at_failures

ALERTS = {
    Code.NO_REAPER: AlertKind.NO_REAPER,
    Code.NO_WORKER_FOR_QUEUE: AlertKind.NO_WORKERS,
    Code.SILENT_WORKER: AlertKind.HEARTBEAT_LATE,
    Code.TASK_FAILING: AlertKind.TASK_FAILING,
    Code.SCHEDULE_FAILING: AlertKind.SCHEDULE_FAILING,
}
"""Which alert is told of what the doctor finds."""


def reaped(ledger: Ledger) -> None:
    assert ledger.take_ticket("sweep", 3600.0)


def nothing(ledger: Ledger, meddler: Backdoor) -> None:
    """Nothing was ever enqueued, and no one ever came."""


def jobs_without_workers(ledger: Ledger, meddler: Backdoor) -> None:
    put(ledger)


def a_paused_queue(ledger: Ledger, meddler: Backdoor) -> None:
    put(ledger)
    ledger.pause("default", "me")


def a_fleet_that_just_started(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.register(birth("w1", **CALM))


def a_fleet_without_a_reaper(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.register(birth("w1", **CALM))
    meddler.age_worker("w1", 3600.0)


def a_disabled_worker(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.register(birth("w1", **CALM))
    ledger.register(birth("w2", **CALM))
    ledger.disable("w1", "broken", "me")
    put(ledger)


def a_silent_worker(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.register(birth("w1", **CALM))
    meddler.age_beat("w1", 60.0)


def failing_jobs(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.register(birth("w1", **CALM))
    for _ in range(5):
        job = running(ledger)
        turn(ledger, endings=[failure(job)])
    ended(ledger, "add", failed=5, succeeded=0)


@pytest.mark.parametrize(
    ("situation", "codes"),
    [
        (nothing, set()),
        (jobs_without_workers, {Code.NO_WORKER_FOR_QUEUE}),
        (a_paused_queue, set()),
        (a_fleet_that_just_started, set()),
        (a_fleet_without_a_reaper, {Code.NO_REAPER}),
        (a_disabled_worker, set()),
        (a_silent_worker, {Code.SILENT_WORKER}),
        (failing_jobs, {Code.TASK_FAILING}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_monitors_the_doctor_and_alerts_find_the_same(
    ledger: Ledger, meddler: Backdoor, url: str, situation: Callable[[Ledger, Backdoor], None], codes: set[Code]
) -> None:
    situation(ledger, meddler)
    settings: Any = config.build({"url": url})
    health = quick_health(ledger, settings)
    assert {trouble.code for trouble in health.troubles} == codes
    assert health.status == ("degraded" if codes else "ok")
    assert {finding.code for finding in examine(gather(ledger, settings))} & set(ALERTS) == codes
    failures = look_at_failures(ledger, Alerts().failure_rate)
    found = find_conditions(ledger.look_for_conditions(), Alerts(), settings.recovery.check_interval_s, failures)
    assert {one.kind for one in found} == {ALERTS[code] for code in codes}
    for trouble in health.troubles:
        assert trouble.message
        assert trouble.cure


def test_queues_without_workers_are_named(ledger: Ledger, url: str) -> None:
    put(ledger, queue="it's slow")
    put(ledger, queue="paused")
    ledger.pause("paused", "me")
    health = quick_health(ledger, config.build({"url": url}))
    assert health.unserved == ("it's slow",)
    [trouble] = health.troubles
    assert """unstuck worker module:app --queues 'it'"'"'s slow'""" in trouble.cure
