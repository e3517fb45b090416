"""The audit log: what operators did, written before it is done, and how it ended.

What was begun and never ended (the process died, the database went away) stays without an outcome: it may have
happened.
"""

import getpass
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from unstuck.config import Settings
from unstuck.domain.units import brief
from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord

MAX_TARGET_CHARS = 300
MAX_OUTCOME_CHARS = 300
NAMED = 10
"""So many jobs are named one by one."""


@dataclass
class AuditEntry:
    outcome: str = "done"


class AuditLog:
    def __init__(self, ledger: Ledger, via: str) -> None:
        self._ledger = ledger
        self._via = via

    @contextmanager
    def record(self, by: str, verb: str, target: str) -> Iterator[AuditEntry]:
        """Hold a note open while something is done; whoever does it may say what came of it."""
        number = self._ledger.begin_audit(_bounded(by), self._via, verb, _bounded(target))
        note = AuditEntry()
        try:
            yield note
        except BaseException as error:
            # The first trouble is the one to tell; a note without an end says enough.
            with suppress(UnstuckError):
                self._ledger.end_audit(number, _bounded(f"failed: {error or type(error).__name__}", MAX_OUTCOME_CHARS))
            raise
        # It is done: a caller who is told otherwise would do it again.
        with suppress(UnstuckError):
            self._ledger.end_audit(number, _bounded(note.outcome, MAX_OUTCOME_CHARS))


def jobs_named(job_ids: Collection[int]) -> str:
    """Name jobs, the first few one by one."""
    first = [str(job_id)[:20] for job_id, _ in zip(job_ids, range(NAMED), strict=False)]
    more = len(job_ids) - len(first)
    return f"{'job' if len(job_ids) == 1 else 'jobs'} {', '.join(first)}{f' and {more} more' if more else ''}"


def queue_named(name: str | None) -> str:
    return "every queue" if name is None else f"queue {name}"


def worker_named(worker: WorkerRecord) -> str:
    return f"worker {worker.name} ({worker.id})"


def silence_named(older_than_s: float | None) -> str:
    return "jobs past their own timeout" if older_than_s is None else f"jobs silent for {brief(older_than_s)}"


def counted(answers: Iterable[str]) -> str:
    """Count equal answers: "3 queued, 1 missing"."""
    found = Counter(answers)
    return ", ".join(f"{number} {answer}" for answer, number in sorted(found.items())) or "nothing to do"


def _bounded(text: str, limit: int = MAX_TARGET_CHARS) -> str:
    # No database of ours stores a NUL, and a note must never be the reason that something fails.
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Verbs:
    def __init__(self, ledger: Ledger, settings: Settings, by: str | None = None, via: str = "python") -> None:
        self._ledger = ledger
        self._settings = settings
        self._by = by or whoami()
        self._audit = AuditLog(ledger, via)

    def _ring(self, words: set[str]) -> None:
        if words:
            self._ledger.notify(words)


def whoami() -> str:
    """Name the person at this keyboard, as well as the system knows them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
