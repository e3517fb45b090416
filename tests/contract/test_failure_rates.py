"""Tasks and schedules whose jobs fail are found: by the doctor and by alerts, with the type of the exception."""

from typing import Any

import pytest
from tests.contract.test_journal import suspend
from tests.contract.test_schedules import definition, fire, only
from tests.support.builders import birth, claim_jobs, done, failure, put, running, turn
from tests.support.doctor import CALM

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import gather
from unstuck.client.doctor.findings import Finding
from unstuck.config import Alerts
from unstuck.domain.states import JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import Count
from unstuck.metrics.counters import Counters
from unstuck.metrics.endings import count_ended
from unstuck.notify.alerts.conditions import compare, find_conditions
from unstuck.notify.failures import look_at_failures

RULES = Alerts()


@pytest.fixture(autouse=True)
def calm(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", **CALM))


def ended(ledger: Ledger, task: str, failed: int, succeeded: int) -> None:
    """Count jobs of a task as a worker does."""
    tallies = Counters()
    if failed:
        count_ended(tallies, "default", task, JobState.FAILED, failed)
    if succeeded:
        count_ended(tallies, "default", task, JobState.SUCCEEDED, succeeded)
    taken = tallies.snapshot()
    counts = [Count(name, labels, value) for (name, labels), value in taken.totals.items()]
    lately = [one for one in counts if one.name == "unstuck_task_jobs_ended_total"]
    ledger.admin.count(counts, lately)


def findings(ledger: Ledger, url: str) -> dict[str, Finding]:
    return {finding.code.value: finding for finding in examine(gather(ledger, config.build({"url": url})))}


def conditions(ledger: Ledger) -> list[tuple[str, str]]:
    """Look once, as a sender of alerts does, and return what was written."""
    look, known = ledger.events.look_for_conditions(), ledger.events.conditions()
    failures = look_at_failures(ledger, RULES.failure_rate)
    found = find_conditions(look, RULES, 10.0, failures, known)
    changes = compare(found, known, look, RULES)
    ledger.events.change_conditions(changes, RULES.remind_every_s)
    return [(change.step, change.kind) for change in changes if "failing" in change.kind]


def test_a_task_whose_jobs_fail_is_found_until_they_succeed_again(ledger: Ledger, url: str) -> None:
    for _ in range(5):
        job = running(ledger)
        turn(ledger, endings=[failure(job)])
    ended(ledger, "add", failed=5, succeeded=0)
    found = findings(ledger, url)["task-failing"]
    assert found.severity == "problem"
    assert found.what == "5 of 5 jobs of task 'add' failed in the last hour (100 %)"
    assert "TASK_FAILED: ValueError: boom" in found.why
    assert "unstuck retry --task add" in found.cure
    assert conditions(ledger) == [("begun", "task_failing")]
    assert conditions(ledger) == []
    [told] = [event for event in ledger.events.list() if event.kind == "task_failing"]
    assert "ValueError: boom" in told.message
    ended(ledger, "add", failed=0, succeeded=15)
    assert findings(ledger, url)["task-failing"].severity == "warning"
    assert conditions(ledger) == []
    ended(ledger, "add", failed=0, succeeded=100)
    assert "task-failing" not in findings(ledger, url)
    assert conditions(ledger) == [("over", "task_failing")]


def test_the_doctor_and_alerts_have_one_rate(ledger: Ledger, url: str) -> None:
    ended(ledger, "add", failed=30, succeeded=70)
    assert findings(ledger, url)["task-failing"].severity == "warning"
    higher: Any = config.build({"url": url, "alerts": {"failure_rate": 0.31}})
    assert "task-failing" not in {finding.code.value for finding in examine(gather(ledger, higher))}


def test_a_few_failures_among_many_are_no_finding(ledger: Ledger, url: str) -> None:
    ended(ledger, "add", failed=4, succeeded=0)
    ended(ledger, "other", failed=10, succeeded=90)
    assert "task-failing" not in findings(ledger, url)


def test_a_schedule_whose_last_job_failed_is_found_until_one_succeeds(ledger: Ledger, url: str) -> None:
    one = definition(name="nightly")
    ledger.schedules.know([one], "app")
    now = ledger.schedules.due([one.fingerprint]).now

    def tick(**ending: Any) -> None:
        fire(ledger, only(ledger), now)
        if ending:
            [job] = claim_jobs(ledger, start=1)
            turn(ledger, **{name: [how(job)] for name, how in ending.items()})

    tick(endings=failure)
    found = findings(ledger, url)["schedule-failing"]
    assert found.what == "The last job of schedule 'nightly' failed"
    assert "ValueError: boom" in found.why
    assert conditions(ledger) == [("begun", "schedule_failing")]
    tick()
    assert conditions(ledger) == [], "the next job has not ended"
    [job] = claim_jobs(ledger, start=1)
    turn(ledger, done=[done(job)])
    assert "schedule-failing" not in findings(ledger, url)
    assert conditions(ledger) == [("over", "schedule_failing")]


def test_jobs_that_sleep_or_wait_for_a_signal_are_not_called_scheduled(ledger: Ledger, url: str) -> None:
    for awaits in (None, "go"):
        job = running(ledger)
        turn(ledger, endings=[suspend(job, 7 * 86_400.0, awaits)])
    assert not {"scheduled-far-off", "scheduled-unserved"} & findings(ledger, url).keys()
    put(ledger, delay_s=7 * 86_400.0)
    found = findings(ledger, url)["scheduled-far-off"]
    assert found.facts["count"] == 1
