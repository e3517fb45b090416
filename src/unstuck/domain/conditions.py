"""Names of everything that the doctor can find. They are stable: scripts and alerts may rely on them."""

import shlex
from collections.abc import Collection
from enum import StrEnum
from typing import Literal

from unstuck.domain.units import brief


class Severity(StrEnum):
    PROBLEM = "problem"
    """Jobs wait in vain, or will: somebody must act."""
    WARNING = "warning"
    """It works, and it will hurt."""
    INFO = "info"
    """Good to know."""


class Code(StrEnum):
    # The ledger itself
    LEDGER_UNREACHABLE = "ledger-unreachable"
    STANDBY = "standby"
    SEVERAL_HOSTS = "several-hosts"
    NO_LEDGER = "no-ledger"
    SCHEMA_BEHIND = "schema-behind"
    SCHEMA_AHEAD = "schema-ahead"
    SCHEMA_FORKED = "schema-forked"
    BLOCKING_TRANSACTION = "blocking-transaction"
    # Jobs that wait
    NO_WORKER_FOR_QUEUE = "no-worker-for-queue"
    TASK_UNKNOWN = "task-unknown"
    WORKERS_LEAVING = "workers-leaving"
    WORKERS_DISABLED = "workers-disabled"
    QUEUE_PAUSED = "queue-paused"
    SCHEDULED_FAR_OFF = "scheduled-far-off"
    SCHEDULED_UNSERVED = "scheduled-unserved"
    DUE_BUT_WAITING = "due-but-waiting"
    QUARANTINED = "quarantined"
    CONCURRENCY_KEY_STUCK = "line-stuck"
    WORKFLOW_PAUSED = "workflow-paused"
    # Jobs that fail
    TASK_FAILING = "task-failing"
    SCHEDULE_FAILING = "schedule-failing"
    # Schedules
    SCHEDULE_PAUSED = "schedule-paused"
    SCHEDULE_UNKNOWN = "schedule-unknown"
    SCHEDULE_TASK_UNKNOWN = "schedule-task-unknown"
    SCHEDULE_OVERDUE = "schedule-overdue"
    # Recovery
    NO_REAPER = "no-reaper"
    REQUEUE_SWITCHED_OFF = "requeue-switched-off"
    FAIL_SWITCHED_OFF = "fail-switched-off"
    # Workers
    IDLE_WORKER = "idle-worker"
    EVERYTHING_DIES = "everything-dies"
    WORKER_DISABLED = "worker-disabled"
    LATE_BEATS = "late-beats"
    SILENT_WORKER = "silent-worker"
    DEAD_WORKER_HOLDS_JOBS = "dead-worker-holds-jobs"
    # The ZeroMQ broker
    MDP_DROPPED = "mdp-dropped"
    # Clocks
    CLOCK_DIFFERS = "clock-differs"
    CLOCK_STEP = "clock-step"
    # The watch over workers
    LEDGER_OUTAGE = "ledger-outage"
    # The bell
    POOLER = "pooler"
    POOLER_WITHOUT_LISTEN_URL = "pooler-without-listen-url"
    NOTIFY_OFF = "notify-off"
    NOTIFY_SILENT = "notify-silent"
    WAKEUP_UNREACHABLE = "bell-unreachable"
    # The database's housekeeping
    RETENTION_BEHIND = "retention-behind"
    DEAD_ROWS = "dead-rows"
    AUTOVACUUM_OFF = "autovacuum-off"
    OLD_SNAPSHOT = "old-snapshot"
    FREE_SPACE = "free-space"
    WAL_LARGE = "wal-large"
    WAL_READER = "wal-reader"
    # Settings
    TIMEOUT_TOO_TIGHT = "timeout-too-tight"
    CHECK_INTERVAL_TOO_LONG = "check-interval-too-long"
    SETTINGS_DIFFER = "settings-differ"
    VERSIONS_DIFFER = "versions-differ"
    # The host
    CONTAINMENT = "containment"
    OOM_GROUP = "oom-group"
    # One job
    SCHEDULED = "scheduled"
    QUEUEING = "queueing"
    CONCURRENCY_KEY_FULL = "line-full"
    QUEUE_AT_LIMIT = "queue-at-limit"
    RATE_LIMITED = "rate-limited"
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    WORKER_GONE = "worker-gone"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


WATCHED: dict[Code, str | None] = {
    Code.NO_WORKER_FOR_QUEUE: "no_workers",
    Code.TASK_UNKNOWN: None,
    Code.WORKERS_LEAVING: None,
    Code.WORKERS_DISABLED: None,
    Code.QUARANTINED: "quarantined",
    Code.WORKFLOW_PAUSED: "workflow_paused",
    Code.TASK_FAILING: "task_failing",
    Code.SCHEDULE_FAILING: "schedule_failing",
    Code.NO_REAPER: "no_reaper",
    Code.SILENT_WORKER: "heartbeat_late",
    Code.DEAD_WORKER_HOLDS_JOBS: "worker_died",
    Code.EVERYTHING_DIES: None,
    Code.WORKER_DISABLED: "crash_loop",
}
"""What monitors are told of, and the alert that people get of it (None: none of its own).

The severity of a finding decides the rest. If it is in this table, a problem makes health "failing" and a warning
"degraded". Every problem and every warning is in the headline of the dashboard. One alert is about no finding, the age
of a backlog: which one is too old is a setting of alerts."""


HealthStatus = Literal["ok", "degraded", "failing"]


def health_of(severities: Collection[Severity]) -> HealthStatus:
    """Return the health of a system of which these are the worst findings: ok, degraded or failing."""
    if Severity.PROBLEM in severities:
        return "failing"
    return "degraded" if Severity.WARNING in severities else "ok"


def why_unserved(queue: str, living: int) -> str:
    """`living` workers serve other queues."""
    verb = "serves" if living == 1 else "serve"
    others = f" ({living:,} worker{'' if living == 1 else 's'} {verb} other queues)" if living else ""
    return f"No living worker serves queue {queue!r}{others}"


def cure_unserved(queue: str) -> str:
    return f"start one with `unstuck worker module:app --queues {shlex.quote(queue)}`"


ROUNDS_MISSED = 10
PATIENCE_S = 5.0
NO_REAPER = "No reaper is running"
NO_REAPER_CURE = "Start a worker without --no-reaper, `unstuck serve`, or `unstuck reaper` as a service."


def reaper_is_missing(unswept_s: float | None, interval_s: float, ages_s: Collection[float]) -> bool:
    """Say whether rounds are missing. `unswept_s` is the time since the last one's ticket ran out (None: there never
    was one), `ages_s` how long the living workers have lived."""
    patience_s = ROUNDS_MISSED * interval_s + PATIENCE_S
    # A fleet that was just started had no time for a round yet.
    if max(ages_s, default=patience_s) < patience_s:
        return False
    return unswept_s is None or unswept_s >= patience_s


def why_reaper_is_missing(unswept_s: float | None, interval_s: float) -> str:
    since = "ever" if unswept_s is None else f"for {brief(unswept_s)}"
    return (
        f"Nobody has taken the sweep ticket {since}; a round is due every {brief(interval_s)}. Until somebody does, "
        "the dead are not found, their jobs are not settled, and scheduled jobs may stay where they are."
    )
