"""Health for monitors that ask often: checks of the doctor that need a few bounded looks."""

from collections.abc import Iterator

import msgspec

from unstuck.client.doctor.facts import Facts, Thresholds, look_at_paused
from unstuck.client.doctor.failures import check_failing
from unstuck.client.doctor.findings import Finding, in_order
from unstuck.client.doctor.jobs import check_waiting, check_workflows
from unstuck.client.doctor.workers import check_fleet, check_reaper
from unstuck.config import Settings
from unstuck.domain.conditions import WATCHED, Code, HealthStatus, Severity, health_of
from unstuck.domain.states import JobState
from unstuck.errors import ErrorCode
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.diagnosis import Diagnosis, JobGroup
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.workers import Fleet
from unstuck.notify.failures import look_at_failures

MAX_QUARANTINED = 100
# With their code they are found by an index, however many jobs failed.
_QUARANTINED = JobFilter(states=(JobState.QUARANTINED,), error=ErrorCode.CRASHED_TOO_OFTEN.value, limit=MAX_QUARANTINED)
_CHECKS = (check_waiting, check_failing, check_workflows, check_reaper, check_fleet)


class Health(msgspec.Struct, frozen=True):
    fleet: Fleet
    unserved: tuple[str, ...]
    """Queues whose ready jobs no living worker serves."""
    troubles: tuple[Finding, ...]
    """The worst first."""

    @property
    def status(self) -> HealthStatus:
        return health_of({one.severity for one in self.troubles})


def quick_health(ledger: Ledger, settings: Settings) -> Health:
    """Look at workers, queues, the reaper, failing and quarantined jobs, and paused workflows, as the doctor does.

    Nothing is looked at twice, and the database and its settings are left out."""
    look = ledger.events.look_for_conditions()
    diagnosis = Diagnosis(
        database="",
        now_at=look.now_at,
        clock_off_s=None,
        round_trip_s=0.0,
        queues=look.queues,
        quarantined=tuple(_quarantined(ledger)),
        unswept_s=look.unswept_s,
    )
    facts = Facts(
        settings,
        "",
        diagnosis=diagnosis,
        workers=tuple(ledger.workers.list()),
        paused=tuple(look_at_paused(ledger)),
        failures=look_at_failures(ledger, settings.alerts.failure_rate),
    )
    found = [
        finding
        for check in _CHECKS
        for finding in check(facts, diagnosis, Thresholds())
        if finding.code in WATCHED and finding.severity is not Severity.INFO
    ]
    unserved = dict.fromkeys(str(one.facts["queue"]) for one in found if one.code is Code.NO_WORKER_FOR_QUEUE)
    return Health(ledger.workers.fleet(), tuple(unserved), tuple(in_order(found)))


def _quarantined(ledger: Ledger) -> Iterator[JobGroup]:
    groups: dict[tuple[str, str], list[int]] = {}
    for job in ledger.jobs.list(_QUARANTINED):
        groups.setdefault((job.queue, job.task), []).append(job.id)
    for (queue, task), ids in groups.items():
        yield JobGroup(queue, task, len(ids), ids[0])
