"""Note where a running job stands when somebody asks: its runner writes its stacks down and goes on undisturbed."""

from collections import deque
from dataclasses import dataclass, replace

from unstuck.domain.events import EventKind
from unstuck.worker.roster import Crew

READ_AFTER_S = 0.1
"""How long a runner usually takes to write them."""
GIVEN_UP_AFTER_S = 5.0
"""A machine that is very busy lets it wait for its turn."""
MAX_ASKED = 100
NOTHING = "Its stack could not be noted: the job took the signal for it away."
TOO_LATE = "Its stack was not noted within 5s: its process is frozen, gets no time, or took the signal for it away."
ENDING = "A job of its process is being ended just now, and the stack is kept for its autopsy; ask again in a moment."
BLOCKED = "The event loop of its runner does not turn, so that it cannot say where this job waits. It stands here:\n\n"


@dataclass(frozen=True)
class StackAsked:
    """Somebody wants to know where a job stands."""

    job_id: int
    token: int


def read_word(word: str, worker_id: str) -> StackAsked | None:
    """Understand what was rung: 'stack:WORKER:JOB:TOKEN'; None for any other word, and for other workers'."""
    kind, _, rest = word.partition(":")
    parts = rest.split(":")
    if kind != "stack" or len(parts) != 3 or parts[0] != worker_id or not (parts[1] + parts[2]).isdecimal():
        return None
    return StackAsked(int(parts[1]), int(parts[2]))


@dataclass(frozen=True)
class _Reading:
    asked: StackAsked
    read_at_s: float
    by_loop: bool
    """The event loop writes it, and not the handler of a signal."""
    until_s: float


class AskedStacks:
    """Used by the floor alone."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[StackAsked, Crew]] = deque()
        self._reading: dict[Crew, _Reading] = {}
        """One at a time of each runner: it has one file for its stacks."""

    def ask(self, asked: StackAsked, crew: Crew | None) -> None:
        """Have the runner of this job write down where it stands; a job that we do not have is none of ours."""
        if crew is not None and len(self._waiting) < MAX_ASKED:
            self._waiting.append((asked, crew))

    def take(self, now_s: float) -> list[tuple[EventKind, int, str]]:
        """Give the jobs whose stacks are there now, with them; and begin with the next ones."""
        told: list[tuple[int, str]] = []
        for crew, reading in list(self._reading.items()):
            if now_s >= reading.read_at_s:
                del self._reading[crew]
                told += self._read(crew, reading, now_s)
        for _ in range(len(self._waiting)):
            asked, crew = self._waiting.popleft()
            if crew in self._reading:
                self._waiting.append((asked, crew))
            elif asked.token in crew.jobs:
                told += self._begin(asked, crew, now_s)
        return [(EventKind.STACK, job_id, text) for job_id, text in told]

    def _begin(self, asked: StackAsked, crew: Crew, now_s: float) -> list[tuple[int, str]]:
        # Whoever is being ended has a stack of its own noted for its autopsy.
        if any(job.stop is not None for job in crew.jobs.values()):
            return [(asked.job_id, ENDING)]
        by_loop = crew.runner.ask_stack(asked.token)
        if not by_loop and not crew.runner.dump_stack():
            return [(asked.job_id, NOTHING)]
        self._reading[crew] = _Reading(asked, now_s + READ_AFTER_S, by_loop, now_s + GIVEN_UP_AFTER_S)
        return []

    def _read(self, crew: Crew, reading: _Reading, now_s: float) -> list[tuple[int, str]]:
        asked = reading.asked
        if asked.token not in crew.jobs or any(job.stop is not None for job in crew.jobs.values()):
            return []
        stack = crew.runner.stack()
        if reading.by_loop and not stack and crew.runner.dump_stack():
            # Another job blocks the loop, or this one does: the signal shows where.
            self._reading[crew] = replace(reading, read_at_s=now_s + READ_AFTER_S, by_loop=False)
            return []
        if not stack and now_s < reading.until_s:
            self._reading[crew] = replace(reading, read_at_s=now_s + READ_AFTER_S)
            return []
        # What it dies of later must not be told with where it stood now.
        crew.runner.forget_stack()
        before = BLOCKED if stack and crew.is_async and not reading.by_loop else ""
        return [(asked.job_id, f"{before}{stack}" or TOO_LATE)]
