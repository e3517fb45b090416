"""Show a living worker as a tile: its beat, its slots, and what it runs now."""

from dataclasses import dataclass

from unstuck.domain.health import BAD_LUCK, Health, read_health
from unstuck.domain.states import JobState, WorkerState
from unstuck.http.page.snapshot import Snapshot
from unstuck.http.page.words import coarse, count
from unstuck.store.records import JobRecord, Progress, WorkerRecord

MAX_RUNNING_SHOWN = 4
MAX_SLOTS_SHOWN = 32
LATE_BEATS = 2.0


@dataclass(frozen=True)
class RunningJob:
    job: JobRecord
    progress: Progress | None

    @property
    def share(self) -> float | None:
        """How far it is, from 0 to 1; None where it did not say."""
        said = self.progress
        if said is None or said.done is None or not said.total or said.total <= 0:
            return None
        return min(1.0, max(0.0, said.done / said.total))


@dataclass(frozen=True)
class Tile:
    worker: WorkerRecord
    running: list[RunningJob]
    more: int
    busy: int
    slots: int
    health: Health
    remark: str
    level: str
    """'good', 'warning' or 'problem'."""


_ORDER = [WorkerState.SUSPECT, WorkerState.DRAINING, WorkerState.ACTIVE, WorkerState.DEAD, WorkerState.STOPPED]


def by_trouble(worker: WorkerRecord) -> tuple[int, str, str]:
    return (_ORDER.index(worker.state), worker.name, worker.id)


def tile_of(worker: WorkerRecord, seen: Snapshot) -> Tile:
    held = seen.held_by(worker.id)
    running = sorted((job for job in held if job.state is JobState.RUNNING), key=lambda job: job.started_at or 0.0)
    shown = [running_job(job, seen) for job in running[:MAX_RUNNING_SHOWN]]
    remark, level = remark_on(worker)
    return Tile(
        worker=worker,
        running=shown,
        more=len(running) - len(shown),
        busy=min(len(running), MAX_SLOTS_SHOWN, worker.concurrency),
        slots=min(worker.concurrency, MAX_SLOTS_SHOWN),
        health=read_health(worker.metadata.get("health")),
        remark=remark,
        level=level,
    )


def running_job(job: JobRecord, seen: Snapshot) -> RunningJob:
    said = seen.progress.get(job.id)
    # What an earlier try said says nothing of this one.
    return RunningJob(job, said if said is not None and said.token == job.token else None)


def remark_on(worker: WorkerRecord) -> tuple[str, str]:
    """Say what is notable about a worker, and how bad it is."""
    if worker.state in (WorkerState.DEAD, WorkerState.SUSPECT) and worker.verdict is not None:
        held = f"; still holds {count(worker.held, 'job')}" if worker.held else ""
        return f"{worker.verdict.evidence}{held}", "problem"
    if worker.state is WorkerState.DEAD:
        return "no cause was written down", "problem"
    if worker.disabled is not None:
        whose = "its host is disabled" if worker.disabled.of_host else "disabled"
        return f"{whose} by {worker.disabled.by}: {worker.disabled.reason}", "warning"
    if worker.state is WorkerState.STOPPED:
        return "", "good"
    if worker.request:
        return f"asked to {worker.request}", "warning"
    if worker.silent_s > max(LATE_BEATS * worker.heartbeat_interval_s, 1.0):
        return f"late: no beat for {coarse(worker.silent_s)}", "warning"
    health = read_health(worker.metadata.get("health"))
    if health.weight > BAD_LUCK:
        return f"{count(health.jobs, 'job')} died in its runners lately (health {health.score:.0%})", "warning"
    return "", "good"
