"""Count what a popup tells, and word it: one dialog for a mass crash, whose text says how many there were.

Pure: no Qt in here. A tally is counted up while its dialog is open, and cleared when somebody has closed it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

MAX_NAMED = 5
MAX_MESSAGE_CHARS = 600
MAX_NAME_CHARS = 80

BECAME = {
    "requeued": "queued again",
    "retrying": "tried again",
    "failed": "failed",
    "quarantined": "quarantined",
    "cancelled": "cancelled",
}
"""What becomes of the jobs of a dead worker, by the kind of the event that tells it."""


class Tally(Protocol):
    def text(self) -> str: ...

    def clear(self) -> None: ...


@dataclass
class CrashTally:
    """Workers that crashed at jobs of ours, as a broker tells it."""

    jobs: Counter[str] = field(default_factory=Counter)
    message: str = ""
    lost: int = 0
    """So many of them will not be tried again."""

    def add(self, job: str, message: str, *, final: bool = False, count: int = 1) -> None:
        self.jobs[job] += count
        self.message = message
        # Only of the one that is told do we know that it is the last word.
        self.lost += final

    def clear(self) -> None:
        self.jobs.clear()
        self.lost = 0

    def text(self) -> str:
        total = self.jobs.total()
        if total == 1:
            head = f"A worker processing job {_quoted(self.jobs)} has crashed."
            tail = "The job will not be retried." if self.lost else "The job will be automatically retried."
        else:
            head = f"Workers have crashed {total:,} times, processing {_quoted(self.jobs)}."
            tail = self._tail_of_many(total)
        return "\n\n".join((head, _short(self.message), tail))

    def _tail_of_many(self, total: int) -> str:
        if not self.lost:
            return "The jobs will be automatically retried."
        if self.lost == total:
            return "The jobs will not be retried."
        return f"{self.lost:,} of them will not be retried, the others automatically."


@dataclass
class AbsenceTally:
    """Jobs of ours that nobody is there for, as a broker tells it."""

    jobs: Counter[str] = field(default_factory=Counter)
    message: str = ""

    def add(self, job: str, message: str, *, count: int = 1) -> None:
        self.jobs[job] += count
        self.message = message

    def clear(self) -> None:
        self.jobs.clear()

    def text(self) -> str:
        total = self.jobs.total()
        what = f"job {_quoted(self.jobs)}" if total == 1 else f"{total:,} jobs: {_quoted(self.jobs)}"
        head = f"No workers are available to process {what}."
        return "\n\n".join((head, _short(self.message), "Please start worker servers and try again."))


@dataclass
class DeathTally:
    """Workers that died, as the ledger tells it, and what became of their jobs."""

    workers: dict[str, str] = field(default_factory=dict)
    """What the dead are called, by their ids, in their order."""
    message: str = ""
    became: Counter[str] = field(default_factory=Counter)

    def add(self, worker_id: str, message: str, name: str = "") -> None:
        self.workers[worker_id] = f"{name} ({worker_id})" if name else worker_id
        self.message = message

    def settle(self, worker_id: str | None, kind: str) -> bool:
        """Count what became of a job, if one of these workers held it; True if so."""
        counts = worker_id in self.workers and kind in BECAME
        self.became[kind] += counts
        return counts

    def clear(self) -> None:
        self.workers.clear()
        self.became.clear()

    def text(self) -> str:
        names = list(self.workers.values())
        if len(names) == 1:
            head = f"Worker {_listed(names)} has died."
        else:
            head = f"{len(names):,} workers have died: {_listed(names)}."
        return "\n\n".join((head, _short(self.message), self._fates(len(names))))

    def _fates(self, dead: int) -> str:
        fates = [f"{count:,} {BECAME[kind]}" for kind, count in self.became.items() if count]
        owner = "its" if dead == 1 else "their"
        if not fates:
            return f"What becomes of {owner} jobs is each job's own rule, and stands in the list of events."
        return f"What became of {owner} jobs: {', '.join(fates)}."


@dataclass
class UnservedTally:
    """Queues that nobody serves, as the ledger tells it."""

    messages: dict[str, None] = field(default_factory=dict)
    """In the order of their first time."""

    def add(self, message: str) -> None:
        self.messages.setdefault(_short(message))

    def clear(self) -> None:
        self.messages.clear()

    def text(self) -> str:
        shown = list(self.messages)[:MAX_NAMED]
        if more := len(self.messages) - len(shown):
            shown.append(f"And {more:,} more.")
        return "\n\n".join(
            (*shown, "Please start worker servers. What is queued stays queued, and runs when one comes.")
        )


def _quoted(jobs: Counter[str]) -> str:
    """Name the commonest jobs, with how many of each where there are several."""
    several = jobs.total() > 1
    return _listed([f"'{_cut(job)}'" + (f" ({count:,})" if several else "") for job, count in jobs.most_common()])


def _listed(names: Iterable[str]) -> str:
    every = [_cut(name) for name in names]
    more = f" and {len(every) - MAX_NAMED:,} more" if len(every) > MAX_NAMED else ""
    return ", ".join(every[:MAX_NAMED]) + more


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
