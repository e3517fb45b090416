"""What tests of the doctor's conditions share: a calm worker, and what it says of a ledger."""

from typing import Any

import msgspec
from tests.support.builders import worker_record

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Facts, Thresholds, gather
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.diagnosis import Diagnosis, QueueBacklog, TableLook, TaskBacklog
from unstuck.ledger.contract.workers import WorkerRecord

CALM: dict[str, Any] = {"heartbeat_interval_s": 5.0, "suspect_after_s": 30.0, "running_stale_after_s": 30.0}


def codes(ledger: Ledger, settings: config.Settings, limits: Thresholds | None = None) -> set[str]:
    """Give the codes of all that the doctor finds, information too."""
    return {finding.code.value for finding in examine(gather(ledger, settings, limits), limits)}


NOW_AT = 1_000_000.0
HERE = "here"


def worker(name: str = "ada", **changes: Any) -> WorkerRecord:
    facts: dict[str, Any] = {
        "host": HERE,
        "created_at": NOW_AT - 3600,
        "last_seen_at": NOW_AT - 1,
        "silent_s": 1.0,
        "processed": 7,
        "metadata": {"containment": "cgroup v2: everything a job starts dies with its runner"},
    }
    return worker_record(name, **{**facts, **changes})


def ready(queue: str = "default", task: str = "add", *, paused: bool = False, number: int = 3) -> QueueBacklog:
    return QueueBacklog(queue, paused, number, (TaskBacklog(task, number, 17, 60.0),))


def diagnosis(**changes: Any) -> Diagnosis:
    facts: dict[str, Any] = {
        "database": "postgresql",
        "now_at": NOW_AT,
        "clock_off_s": 0.0,
        "round_trip_s": 0.001,
        "unswept_s": 0.0,
        "tables": (
            TableLook("jobs", 1_000, 100, 8192, 30.0, True),
            TableLook("worker_heartbeats", 2, 3, 8192, 30.0, True),
        ),
    }
    return Diagnosis(**{**facts, **changes})


def facts(*workers: WorkerRecord, settings: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """A healthy system with these workers (one, where none is given); `changes` are of the diagnosis."""
    return Facts(
        config.build({"url": "postgresql://db/x", **(settings or {})}),
        HERE,
        diagnosis=diagnosis(**changes),
        workers=workers or (worker(),),
    )


def with_(given: Facts, **changes: Any) -> Facts:
    return msgspec.structs.replace(given, **changes)


def found(given: Facts, limits: Thresholds | None = None) -> dict[str, Finding]:
    """Examine, and give what is more than information, by code; each finding is whole."""
    findings = examine(given, limits)
    for finding in findings:
        assert finding.what, finding
        assert finding.why.endswith((".", ")")), finding
        assert finding.cure or finding.severity is Severity.INFO, finding
    return {finding.code.value: finding for finding in findings if finding.severity is not Severity.INFO}


def told(given: Facts) -> set[str]:
    """Give the codes of what is only information."""
    return {finding.code.value for finding in examine(given) if finding.severity is Severity.INFO}
