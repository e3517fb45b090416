"""The audit log: what operators do, written down before it is done, and how it ended.

An action that was begun and never ended (the process died, the database went away) stays without an outcome: it may
have happened.
"""

import getpass
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from unstuck.domain.units import brief
from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord

MAX_TARGET_CHARS = 300
MAX_OUTCOME_CHARS = 300
NAMED = 10
"""Number of jobs that an entry names one by one."""


@dataclass
class AuditEntry:
    outcome: str = "done"


class AuditLog:
    """Write down what one operator does. `via` is the way they came: cli, http, page or python."""

    def __init__(self, ledger: Ledger, by: str, via: str) -> None:
        self._ledger = ledger
        self._via = via
        self.by = by
        """The operator's name, as it appears in events and causes."""

    @contextmanager
    def record(self, verb: str, target: str) -> Iterator[AuditEntry]:
        """Keep an entry open while something is done; the caller may set its outcome."""
        number = self._ledger.admin.begin_audit(_bounded(self.by), self._via, verb, _bounded(target))
        entry = AuditEntry()
        try:
            yield entry
        except BaseException as error:
            # The first error is the one to report; an entry without an outcome says enough.
            with suppress(UnstuckError):
                self._ledger.admin.end_audit(
                    number, _bounded(f"failed: {error or type(error).__name__}", MAX_OUTCOME_CHARS)
                )
            raise
        # It is done: a caller who is told otherwise would do it again.
        with suppress(UnstuckError):
            self._ledger.admin.end_audit(number, _bounded(entry.outcome, MAX_OUTCOME_CHARS))


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
    # No database of ours stores a NUL, and an entry must never be the reason that something fails.
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def whoami() -> str:
    """Return the name of the person at this keyboard, as far as the system knows it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
