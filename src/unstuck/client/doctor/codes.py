"""Name everything the doctor can find. The names are stable: scripts and alerts may go by them."""

from enum import StrEnum


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
    LINE_STUCK = "line-stuck"
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
    BELL_UNREACHABLE = "bell-unreachable"
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
    LINE_FULL = "line-full"
    QUEUE_AT_LIMIT = "queue-at-limit"
    RATE_LIMITED = "rate-limited"
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    WORKER_GONE = "worker-gone"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
