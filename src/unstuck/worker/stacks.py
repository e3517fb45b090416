"""Note where a running job stands when somebody asks: its runner writes its stacks down and goes on undisturbed.

Of an async job the event loop knows best where it waits. Else the pulse says where all threads stand, and nobody
notices. Only where it has no chance to, because C code holds the GIL, the job's thread is asked by a signal.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

from unstuck.domain.events import EventKind
from unstuck.worker.messages import StackRequested
from unstuck.worker.slots import Slot

LOOP_S = 0.1
"""So long an event loop has to say where a job of it waits: else it does not turn."""
PULSE_S = 3.0
"""So long the pulse has. Among many busy threads, or with little of a processor, it waits for its turn."""
SILENT_PULSE_S = 0.1
"""The same where no Python code has run for long: it will not answer, unless that has just ended."""
SIGNAL_S = 0.1
"""How long the handler of a signal usually takes."""
GIVEN_UP_AFTER_S = 5.0
"""A machine that is very busy lets it wait for its turn."""
MAX_ASKED = 100
NOTHING = "Its stack could not be noted: the job closed what it is asked by, and took the signal for it away."
TOO_LATE = "Its stack was not noted within 5s: its process is frozen, gets no time, or took the signal for it away."
ENDING = "A job of its process is being ended just now, and the stack is kept for its autopsy; ask again in a moment."
BLOCKED = "The event loop of its runner does not turn, so that it cannot say where this job waits. It stands here:\n\n"


def read_stack_topic(word: str, worker_id: str) -> StackRequested | None:
    """Understand what was rung: 'stack:WORKER:JOB:TOKEN'; None for any other word, and for other workers'."""
    kind, _, rest = word.partition(":")
    parts = rest.split(":")
    if kind != "stack" or len(parts) != 3 or parts[0] != worker_id or not (parts[1] + parts[2]).isdecimal():
        return None
    return StackRequested(int(parts[1]), int(parts[2]))


class _Way(Enum):
    """Who writes it."""

    LOOP = 1
    PULSE = 2
    SIGNAL = 3


@dataclass(frozen=True)
class _Reading:
    asked: StackRequested
    way: _Way
    read_at_s: float
    until_s: float


class StackReader:
    """Used by the floor alone."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[StackRequested, Slot]] = deque()
        self._reading: dict[Slot, _Reading] = {}
        """One at a time of each runner: it has one file for its stacks."""

    def ask(self, asked: StackRequested, slot: Slot | None) -> None:
        """Have the runner of this job write down where it stands; a job that we do not have is none of ours."""
        if slot is not None and len(self._waiting) < MAX_ASKED:
            self._waiting.append((asked, slot))

    def take(self, now_s: float) -> list[tuple[EventKind, int, str]]:
        """Give the jobs whose stacks are there now, with them; and begin with the next ones."""
        told: list[tuple[int, str]] = []
        for slot, reading in list(self._reading.items()):
            if now_s >= reading.read_at_s or (reading.way is _Way.PULSE and slot.runner.stacks.told):
                del self._reading[slot]
                told += self._read(slot, reading, now_s)
        for _ in range(len(self._waiting)):
            asked, slot = self._waiting.popleft()
            if slot in self._reading:
                self._waiting.append((asked, slot))
            elif asked.token in slot.jobs:
                told += self._begin(asked, slot, now_s)
        return [(EventKind.STACK, job_id, text) for job_id, text in told]

    def _begin(self, asked: StackRequested, slot: Slot, now_s: float) -> list[tuple[int, str]]:
        # Whoever is being ended has a stack of its own noted for its autopsy.
        if any(job.stop is not None for job in slot.jobs.values()):
            return [(asked.job_id, ENDING)]
        slot.runner.stacks.forget()
        found = self._ask(slot, asked, _Way.LOOP, now_s, now_s + GIVEN_UP_AFTER_S)
        return [] if found else [(asked.job_id, NOTHING)]

    def _ask(self, slot: Slot, asked: StackRequested, way: _Way, now_s: float, until_s: float) -> bool:
        """Ask in this way, or in the next one that there is; False where there is none."""
        if way is _Way.LOOP and slot.runner.ask_stack(asked.token):
            patience_s = LOOP_S
        elif way is not _Way.SIGNAL and slot.runner.stacks.ask():
            way, patience_s = _Way.PULSE, SILENT_PULSE_S if slot.silent else PULSE_S
        elif slot.runner.dump_stack(silent=slot.silent):
            way, patience_s = _Way.SIGNAL, SIGNAL_S
        else:
            return False
        self._reading[slot] = _Reading(asked, way, now_s + patience_s, until_s)
        return True

    def _read(self, slot: Slot, reading: _Reading, now_s: float) -> list[tuple[int, str]]:
        asked, way = reading.asked, reading.way
        if any(job.stop is not None for job in slot.jobs.values()):
            return []
        if asked.token not in slot.jobs:
            if slot.gone_s is None:
                slot.runner.stacks.forget()
            return []
        stack = slot.runner.stacks.text()
        if not stack and now_s < reading.until_s:
            if way is _Way.SIGNAL:
                self._reading[slot] = replace(reading, read_at_s=now_s + SIGNAL_S)
                return []
            # Another job blocks the loop, or this one does; or C code holds the GIL.
            if self._ask(slot, asked, _Way(way.value + 1), now_s, reading.until_s):
                return []
        # What it dies of later must not be told with where it stood now.
        slot.runner.stacks.forget()
        before = BLOCKED if stack and slot.is_async and way is not _Way.LOOP else ""
        return [(asked.job_id, f"{before}{stack}" or TOO_LATE)]
