"""Every metric there is: its name, what it means, its labels. Names and units as Prometheus wants them.

Counters and histograms are tallied in each process and added up in the ledger; gauges are read from the ledger when
somebody asks. docs/metrics.md says the same for people, and a test compares them.
"""

from dataclasses import dataclass

LE = "le"
"""The label of a bucket: the upper bound of what it holds."""


@dataclass(frozen=True)
class Counter:
    name: str
    help: str
    labels: tuple[str, ...] = ()
    per_minute_labels: tuple[str, ...] | None = None
    """By which of its labels it is also kept minute by minute, for charts; None where it is not."""


@dataclass(frozen=True)
class Histogram:
    name: str
    help: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...] = ()
    per_minute_labels: tuple[str, ...] | None = None

    @property
    def sum_name(self) -> str:
        return f"{self.name}_sum"


@dataclass(frozen=True)
class Gauge:
    name: str
    help: str
    labels: tuple[str, ...] = ()


# A no-op takes a tenth of a millisecond, a backup an hour: a wide scale with few steps, since every step is a row.
JOB_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
DETECTION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
BEAT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SWEEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Counted in the process where it happens ------------------------------------------------------

JOBS_ENDED = Counter(
    "unstuck_jobs_ended_total",
    "Jobs that reached a final state.",
    ("queue", "state"),
    per_minute_labels=("queue", "state"),
)
TASK_ENDED = Counter(
    "unstuck_task_jobs_ended_total",
    "Jobs that succeeded or failed, by task. Quarantined jobs count as failed, cancelled ones are left out.",
    ("task", "outcome"),
    per_minute_labels=("task", "outcome"),
)
JOB_WAIT = Histogram(
    "unstuck_job_wait_seconds",
    "Time from when an attempt was due until it began.",
    JOB_BOUNDS,
    ("queue", "task"),
    per_minute_labels=(),
)
JOB_RUN = Histogram(
    "unstuck_job_run_seconds",
    "Time that attempts ran, however they ended.",
    JOB_BOUNDS,
    ("queue", "task"),
    per_minute_labels=(),
)
JOB_RETRIES = Counter(
    "unstuck_job_retries_total",
    "Attempts that ended badly and left their job to be tried again, by what went wrong.",
    ("queue", "code"),
)
JOBS_REQUEUED = Counter(
    "unstuck_jobs_requeued_total",
    "Jobs that the reaper took from a dead, silent or stopped worker and gave back to their queue.",
    ("queue",),
)
DEATHS = Counter(
    "unstuck_deaths_total",
    "Deaths of processes, by what died (runner or worker), why, and who saw it.",
    ("process", "cause", "detector"),
    per_minute_labels=("process", "cause"),
)
DETECTION = Histogram(
    "unstuck_death_detection_seconds",
    "Time from a death, or the last sign of life, until it was known, where that can be measured.",
    DETECTION_BOUNDS,
    ("process", "detector"),
)
SUPERSEDED = Counter(
    "unstuck_superseded_writes_total",
    "Writes of a worker that the ledger refused because the attempt was no longer its own.",
)
BEAT_DELAY = Histogram(
    "unstuck_beat_delay_seconds",
    "How long after it was due a worker's heartbeat was confirmed by the ledger.",
    BEAT_BOUNDS,
)
SCHEDULE_DELAY = Histogram(
    "unstuck_schedule_delay_seconds",
    "How long after its tick a schedule enqueued its job.",
    DETECTION_BOUNDS,
)
MDP_DROPPED = Counter(
    "unstuck_mdp_dropped_total",
    "Messages that the ZeroMQ broker dropped, by why.",
    ("why",),
    per_minute_labels=("why",),
)
SWEEP = Histogram("unstuck_sweep_seconds", "Time that the reaper's rounds took.", SWEEP_BOUNDS)

TALLIED: tuple[Counter | Histogram, ...] = (
    *(JOBS_ENDED, TASK_ENDED, JOB_WAIT, JOB_RUN, JOB_RETRIES, JOBS_REQUEUED),
    *(DEATHS, DETECTION, SUPERSEDED, BEAT_DELAY, SWEEP, SCHEDULE_DELAY, MDP_DROPPED),
)

# Read from the ledger -------------------------------------------------------------------------

JOBS = Gauge(
    "unstuck_jobs",
    "Unfinished jobs, by queue and state; scheduled ones are not due yet, blocked ones wait for their concurrency key.",
    ("queue", "state"),
)
OLDEST_PENDING = Gauge(
    "unstuck_queue_oldest_pending_age_seconds",
    "How long the oldest job that is due has waited; 0 where none waits.",
    ("queue",),
)
QUEUE_PAUSED = Gauge("unstuck_queue_paused", "1 where an operator paused the queue.", ("queue",))
QUEUE_WORKERS = Gauge("unstuck_queue_workers", "Living workers that serve the queue.", ("queue",))
WORKERS = Gauge("unstuck_workers", "Workers, by state; the dead and stopped until retention removes them.", ("state",))
WORKERS_LATE = Gauge("unstuck_workers_late", "Living workers that missed two heartbeats in a row.")
WORKER_SILENCE = Gauge("unstuck_worker_silence_seconds", "The longest time that a living worker has not been heard of.")
SWEEP_OVERDUE = Gauge(
    "unstuck_sweep_overdue_seconds",
    "Time since the last reaper's round ran out; 0 while reapers walk their rounds, +Inf where there never was one.",
)
BUILD = Gauge("unstuck_build_info", "The version of Unstuck that answers; always 1.", ("version",))

READ: tuple[Gauge, ...] = (
    *(JOBS, OLDEST_PENDING, QUEUE_PAUSED, QUEUE_WORKERS, WORKERS, WORKERS_LATE, WORKER_SILENCE, SWEEP_OVERDUE, BUILD),
)
