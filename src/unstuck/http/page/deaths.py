"""Say what died lately, and of what: workers by their verdicts, runners by the events of their jobs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from unstuck.client.why.endings import brief_cause
from unstuck.domain.states import WorkerState
from unstuck.store.records import EventRecord, WorkerRecord

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
class Death:
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


def recent_deaths(
    workers: Iterable[WorkerRecord], events: Iterable[EventRecord], tasks: Mapping[int, str], now_s: float
) -> list[Death]:
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


def died_at(worker: WorkerRecord) -> float:
    return worker.stopped_at or worker.last_seen_at


def _died_lately(worker: WorkerRecord, now_s: float) -> bool:
    return worker.state is WorkerState.DEAD and died_at(worker) >= now_s - LATELY_S


def _of_worker(worker: WorkerRecord) -> Death:
    verdict = worker.verdict
    if verdict is None:
        cause = "no cause was written down"
    else:
        cause = brief_cause(verdict.autopsy) if verdict.autopsy is not None else verdict.evidence
    detector = verdict.detector.value if verdict is not None else ""
    return Death(died_at(worker), "worker", cause, [Name(worker.id, worker.name)], detector=detector)


def _of_runner(event: EventRecord, tasks: Mapping[int, str]) -> Death | None:
    if event.job_id is None or event.kind not in BECAME:
        return None
    crash = _CRASHES.match(event.message)
    requeued = _REQUEUED.match(event.message)
    cause = crash[2] if crash else requeued[1] if requeued else None
    if cause is None:
        return None
    name = Name(str(event.job_id), f"#{event.job_id}")
    return Death(event.at, "runner", cause, [name], tasks.get(event.job_id, ""), became={BECAME[event.kind]: 1})


def _together(deaths: list[Death]) -> list[Death]:
    told: list[Death] = []
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


def _alike(one: Death, other: Death) -> bool:
    if (one.what, one.cause, one.task) != (other.what, other.cause, other.task):
        return False
    # The same task that dies of the same cause all hour is one trouble; two deaths of workers an hour apart are two.
    return one.what == "runner" or one.at - other.at <= SAME_MOMENT_S
