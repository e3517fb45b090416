"""Monitors, the doctor and alerts judge by one set of rules: what is a problem for one is a problem for all."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.contract.test_failure_rates import ended
from tests.support import dashboard
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, failure, put, running, turn, verdict
from tests.support.doctor import CALM

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import gather
from unstuck.client.doctor.findings import capital
from unstuck.client.doctor.health import quick_health
from unstuck.domain.conditions import WATCHED, Code
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.worker_health import IN_A_ROW
from unstuck.http.dashboard.overview import sum_up
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.notify.alerts.conditions import CONDITIONS, AlertKind, find_conditions
from unstuck.notify.failures import look_at_failures

TOLD = frozenset({AlertKind.QUARANTINED, AlertKind.WORKFLOW_PAUSED, AlertKind.WORKER_DIED, AlertKind.CRASH_LOOP})
"""Alerts of what happened once: they are made of an event. All others are of a condition that lasts."""


def reaped(ledger: Ledger) -> None:
    assert ledger.maintenance.take_ticket("sweep", 3600.0)


def nothing(ledger: Ledger, meddler: Backdoor) -> None:
    """Nothing was ever enqueued, and no one ever came."""


def jobs_without_workers(ledger: Ledger, meddler: Backdoor) -> None:
    put(ledger)


def a_paused_queue(ledger: Ledger, meddler: Backdoor) -> None:
    put(ledger)
    ledger.queues.pause("default", "me")


def a_fleet_that_just_started(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.workers.register(birth("w1", **CALM))


def a_fleet_without_a_reaper(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.workers.register(birth("w1", **CALM))
    meddler.age_worker("w1", 3600.0)


def a_disabled_worker(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    ledger.workers.register(birth("w2", **CALM))
    ledger.workers.disable("w1", "broken", "me")
    put(ledger)


def a_silent_worker(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    meddler.age_beat("w1", 60.0)


def failing_jobs(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    for _ in range(5):
        job = running(ledger)
        turn(ledger, endings=[failure(job)])
    ended(ledger, "add", failed=5, succeeded=0)


def jobs_of_which_some_fail(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    ended(ledger, "add", failed=30, succeeded=70)


def jobs_of_which_few_fail(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    ended(ledger, "add", failed=19, succeeded=81)


def a_quarantined_job(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", **CALM))
    job = running(ledger)
    error = JobError("CRASHED_TOO_OFTEN", "It killed 4 runners", "SIGSEGV", {})
    turn(ledger, endings=[Ending(job.job_id, job.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error)])


def a_dead_worker_with_jobs(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    for worker_id in ("w1", "w2"):
        ledger.workers.register(birth(worker_id, **CALM))
    running(ledger, "w2")
    assert ledger.recovery.declare_dead("w2", verdict(), GuardNone())
    meddler.age_worker("w2", 60.0)


def a_worker_under_which_all_jobs_die(ledger: Ledger, meddler: Backdoor) -> None:
    reaped(ledger)
    ledger.workers.register(birth("w1", metadata={"health": {"in_a_row": IN_A_ROW, "deaths": IN_A_ROW}}, **CALM))


SITUATIONS: list[tuple[Callable[[Ledger, Backdoor], None], dict[Code, str]]] = [
    (nothing, {}),
    (jobs_without_workers, {Code.NO_WORKER_FOR_QUEUE: "problem"}),
    (a_paused_queue, {}),
    (a_fleet_that_just_started, {}),
    (a_fleet_without_a_reaper, {Code.NO_REAPER: "problem"}),
    (a_disabled_worker, {}),
    (a_silent_worker, {Code.SILENT_WORKER: "warning"}),
    (failing_jobs, {Code.TASK_FAILING: "problem"}),
    (jobs_of_which_some_fail, {Code.TASK_FAILING: "warning"}),
    (jobs_of_which_few_fail, {}),
    (a_quarantined_job, {Code.QUARANTINED: "warning"}),
    (a_dead_worker_with_jobs, {Code.DEAD_WORKER_HOLDS_JOBS: "problem"}),
    (a_worker_under_which_all_jobs_die, {Code.EVERYTHING_DIES: "problem"}),
]


@pytest.mark.parametrize(("situation", "codes"), SITUATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_monitors_the_doctor_alerts_and_the_headline_find_the_same(
    ledger: Ledger,
    meddler: Backdoor,
    url: str,
    situation: Callable[[Ledger, Backdoor], None],
    codes: dict[Code, str],
) -> None:
    situation(ledger, meddler)
    settings: Any = config.build({"url": url})
    health = quick_health(ledger, settings)
    assert {trouble.code: trouble.severity for trouble in health.troubles} == codes
    worst = "problem" in codes.values()
    assert health.status == ("failing" if worst else "degraded" if codes else "ok")
    findings = tuple(examine(gather(ledger, settings)))
    watched = {finding.code: finding for finding in findings if finding.code in WATCHED and finding.severity != "info"}
    assert {code: finding.severity for code, finding in watched.items()} == codes
    failures = look_at_failures(ledger, settings.alerts.failure_rate)
    found = find_conditions(ledger.events.look_for_conditions(), settings.alerts, 1.0, failures)
    kinds = {AlertKind(kind) for code in codes if (kind := WATCHED[code]) is not None}
    assert {one.kind for one in found} == kinds - TOLD
    headline = sum_up(dashboard.snapshot(time.time(), ledger.workers.list(), findings), [])
    assert (headline.level == "problem") == worst
    if codes:
        assert any(headline.sentence.startswith(capital(finding.what)) for finding in watched.values())
    for trouble in health.troubles:
        assert trouble.what
        assert trouble.cure


def test_every_alert_is_about_something_that_monitors_are_told_of() -> None:
    about = {kind for kind in WATCHED.values() if kind is not None}
    assert about == set(AlertKind) - {AlertKind.BACKLOG_OLD}, "how old a backlog may be is a setting of alerts alone"
    assert set(CONDITIONS) == (set(AlertKind) - TOLD)


def test_queues_without_workers_are_named(ledger: Ledger, url: str) -> None:
    put(ledger, queue="it's slow")
    put(ledger, queue="paused")
    ledger.queues.pause("paused", "me")
    health = quick_health(ledger, config.build({"url": url}))
    assert health.unserved == ("it's slow",)
    assert health.status == "failing"
    [trouble] = health.troubles
    assert """unstuck worker module:app --queues 'it'"'"'s slow'""" in trouble.cure
