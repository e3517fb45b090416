"""The overview page: headline, recent crashes, worker cards."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.client.doctor.findings import Finding
from unstuck.client.why.autopsies import brief_cause
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.conditions import Severity
from unstuck.domain.failure_rates import percent
from unstuck.domain.states import LIVE_STATES, JobState, WorkerState
from unstuck.domain.worker_health import BAD_LUCK, Health, read_health
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.pages import Page, View
from unstuck.http.dashboard.rendering import capital, coarse, count, render
from unstuck.http.dashboard.snapshot import Snapshot
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import JobRecord, Progress
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.notify.failures import FAILED

LATELY_S = 3600.0
SAME_MOMENT_S = 60.0
"""Workers that died of the same cause so close together are told as one."""

BECAME = {"requeued": "re-queued", "failed": "failed", "quarantined": "quarantined", "retrying": "tried again"}

_CRASHES = re.compile(r"^(WORKER_CRASHED|OUT_OF_MEMORY|DEADLINE_EXCEEDED|STALLED|CRASHED_TOO_OFTEN): (.*)$", re.DOTALL)
_REQUEUED = re.compile(r"^Task re-queued: (.*)$", re.DOTALL)
_OF_WORKER = re.compile(r"^worker (\S+) on host ")


@dataclass(frozen=True)
class Name:
    """Who died: a worker, or the runner of a job."""

    id: str
    text: str


@dataclass
class Crash:
    at: float
    """The last one, where several are told together."""
    what: Literal["worker", "runner"]
    cause: str
    names: list[Name]
    task: str = ""
    """Whose runner it was."""
    detector: str = ""
    times: list[float] = field(default_factory=list)
    """When each of them died, where several are told together."""
    became: dict[str, int] = field(default_factory=dict)
    """What became of the jobs, with their number."""

    def __post_init__(self) -> None:
        self.times = self.times or [self.at]

    @property
    def count(self) -> int:
        return len(self.times)

    def since(self, at: float) -> int:
        """Say how many of them died since then."""
        return sum(time >= at for time in self.times)


def recent_crashes(
    workers: Iterable[WorkerRecord], events: Iterable[EventRecord], tasks: Mapping[int, str], now_s: float
) -> list[Crash]:
    """Give the deaths of the last hour, newest first; those that are alike together."""
    found = [_of_worker(worker) for worker in workers if _died_lately(worker, now_s)]
    by_worker = {death.names[0].id: death for death in found}
    for event in events:
        death = _of_runner(event, tasks)
        if death is None or event.at < now_s - LATELY_S:
            continue
        # A job that was lost with its whole worker is part of that worker's death.
        lost_with = _OF_WORKER.match(death.cause)
        if lost_with and lost_with[1] in by_worker:
            became = by_worker[lost_with[1]].became
            became[BECAME[event.kind]] = became.get(BECAME[event.kind], 0) + 1
        elif not lost_with:
            found.append(death)
    return _together(sorted(found, key=lambda death: -death.at))


def crashed_at(worker: WorkerRecord) -> float:
    return worker.stopped_at or worker.last_seen_at


def _died_lately(worker: WorkerRecord, now_s: float) -> bool:
    return worker.state is WorkerState.DEAD and crashed_at(worker) >= now_s - LATELY_S


def _of_worker(worker: WorkerRecord) -> Crash:
    verdict = worker.verdict
    if verdict is None:
        cause = "no cause was written down"
    else:
        cause = brief_cause(verdict.autopsy) if verdict.autopsy is not None else verdict.evidence
    detector = verdict.detector.value if verdict is not None else ""
    return Crash(crashed_at(worker), "worker", cause, [Name(worker.id, worker.name)], detector=detector)


def _of_runner(event: EventRecord, tasks: Mapping[int, str]) -> Crash | None:
    if event.job_id is None or event.kind not in BECAME:
        return None
    crash = _CRASHES.match(event.message)
    requeued = _REQUEUED.match(event.message)
    cause = crash[2] if crash else requeued[1] if requeued else None
    if cause is None:
        return None
    name = Name(str(event.job_id), f"#{event.job_id}")
    return Crash(event.at, "runner", cause, [name], tasks.get(event.job_id, ""), became={BECAME[event.kind]: 1})


def _together(deaths: list[Crash]) -> list[Crash]:
    told: list[Crash] = []
    for death in deaths:
        like = next((one for one in told if _alike(one, death)), None)
        if like is None:
            told.append(death)
            continue
        like.times += death.times
        like.names += [name for name in death.names if name not in like.names]
        for became, number in death.became.items():
            like.became[became] = like.became.get(became, 0) + number
    return told


def _alike(one: Crash, other: Crash) -> bool:
    if (one.what, one.cause, one.task) != (other.what, other.cause, other.task):
        return False
    # The same task that dies of the same cause all hour is one trouble; two deaths of workers an hour apart are two.
    return one.what == "runner" or one.at - other.at <= SAME_MOMENT_S


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
class WorkerCard:
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


def card_of(worker: WorkerRecord, seen: Snapshot) -> WorkerCard:
    held = seen.held_jobs(worker.id)
    running = sorted((job for job in held if job.state is JobState.RUNNING), key=lambda job: job.started_at or 0.0)
    shown = [running_job(job, seen) for job in running[:MAX_RUNNING_SHOWN]]
    remark, level = remark_on(worker)
    return WorkerCard(
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


JUST_NOW_S = 300.0

Level = Literal["good", "warning", "problem", "unknown"]
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Headline:
    level: Level
    sentence: str
    cure: str = ""
    also: str = ""
    """Who died a moment ago, where something else is worse."""
    more: int = 0
    """Further findings of the doctor."""
    facts: Facts = ()
    """Figures with their labels."""


def sum_up(seen: Snapshot, deaths: Sequence[Crash]) -> Headline:
    """Give the worst first: what the doctor calls a problem, then what can be seen at a glance, then warnings."""
    facts = _facts(seen, deaths)
    found = seen.findings or ()
    problems = [finding for finding in found if finding.severity is Severity.PROBLEM]
    warnings = [finding for finding in found if finding.severity is Severity.WARNING]
    at_a_glance = _suspects(seen)
    fresh = [death for death in deaths if seen.at - death.at <= JUST_NOW_S]
    died = _died(fresh, seen.at - JUST_NOW_S) if fresh else ""
    if problems:
        return _of(problems[0], "problem", died, len(problems) + len(warnings) - 1, facts)
    if at_a_glance:
        cure = "The reaper decides within the heartbeat timeout."
        return Headline("problem", at_a_glance, cure, died, len(warnings), facts)
    if not any(worker.state in LIVE_STATES for worker in seen.workers):
        cure = "Start one with `unstuck worker module:app`."
        if any(queue.pending for queue in seen.queues):
            return Headline("problem", "Jobs wait, and no worker is alive.", cure, died, 0, facts)
        return Headline("unknown", "No worker is alive, and no job waits.", cure, died, 0, facts)
    if died:
        return Headline("warning", died, "", "", len(warnings), facts)
    if warnings:
        return _of(warnings[0], "warning", "", len(warnings) - 1, facts)
    if seen.findings is None:
        # He sees what no glance does: tasks that no worker knows, timeouts that are too tight.
        return Headline("unknown", "Nothing is wrong at a glance; the doctor is still looking.", "", "", 0, facts)
    return Headline("good", "Everything is all right.", "", "", 0, facts)


def _of(finding: Finding, level: Level, died: str, more: int, facts: Facts) -> Headline:
    sentence = capital(finding.what.rstrip("."))
    return Headline(level, f"{sentence}.", finding.cure, died, more, facts)


def _suspects(seen: Snapshot) -> str:
    suspects = [worker.name for worker in seen.workers if worker.state is WorkerState.SUSPECT]
    if not suspects:
        return ""
    named = ", ".join(suspects[:3]) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
    return f"{count(len(suspects), 'worker')} fell silent: {named}."


def _died(deaths: Sequence[Crash], since: float) -> str:
    """Say how many died, and of what the last one did: the newest comes first."""
    numbers = {what: sum(death.since(since) for death in deaths if death.what == what) for what in ("worker", "runner")}
    parts = [count(number, what) for what, number in numbers.items() if number]
    newest = deaths[0]
    last = f"worker {newest.names[0].text}" if newest.what == "worker" else f"a runner of {newest.task or 'a job'}"
    return f"{' and '.join(parts)} died in the last five minutes, lately {last}: {newest.cause}."


def _facts(seen: Snapshot, deaths: Sequence[Crash]) -> Facts:
    living = sum(worker.state in LIVE_STATES for worker in seen.workers)
    running = sum(queue.running for queue in seen.queues)
    pending = sum(queue.pending for queue in seen.queues)
    died = sum(death.count for death in deaths)
    failed, ended = _ends(seen)
    rate = f" ({percent(failed / ended)})" if failed else ""
    return (
        (f"{living:,}", "worker alive" if living == 1 else "workers alive"),
        (f"{running:,}", "running"),
        (f"{pending:,}", "ready"),
        (f"{failed:,}", f"failed in an hour{rate}"),
        (f"{died:,}", "died in an hour"),
    )


def _ends(seen: Snapshot) -> tuple[int, int]:
    """Return how many jobs failed in the last hour, and how many failed or succeeded."""
    counted = [
        sum(minute.ended.get(state.value, 0) for minute in seen.minutes) for state in (*FAILED, JobState.SUCCEEDED)
    ]
    return sum(counted[:-1]), sum(counted)


MAX_CRASHES = 5
MAX_CARDS = 24
MAX_QUEUES = 8

router = APIRouter()


def overview_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    deaths = recent_crashes(seen.workers, seen.events, seen.tasks_of, seen.at)
    living = sorted((worker for worker in seen.workers if worker.state in LIVE_STATES), key=by_trouble)
    queues = sorted(seen.queues, key=lambda queue: (-(queue.oldest_pending_s or 0.0), queue.name))
    return {
        "health": sum_up(seen, deaths),
        "charts": viewing.charts.of(seen.minutes),
        "deaths": deaths[:MAX_CRASHES],
        "more_deaths": max(0, len(deaths) - MAX_CRASHES),
        "tiles": [card_of(worker, seen) for worker in living[:MAX_CARDS]],
        "more_tiles": max(0, len(living) - MAX_CARDS),
        "queues": queues[:MAX_QUEUES],
        "more_queues": max(0, len(queues) - MAX_QUEUES),
    }


OVERVIEW_PAGE = Page(
    "overview",
    "overview.html",
    overview_data,
    {
        "health": "overview/health.html",
        "charts": "overview/charts.html",
        "deaths": "overview/crashes.html",
        "queues": "overview/queues.html",
        "tiles": "overview/workers.html",
    },
)


@router.get("/")
def overview(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    viewing.snapshots.examine()
    return render(request, OVERVIEW_PAGE.template, room=OVERVIEW_PAGE.name, **OVERVIEW_PAGE.values(viewing))
