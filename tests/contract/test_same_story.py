"""One list of stories runs on both databases: the answers, the rows and the texts of events are the same."""

import datetime
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.stories import STORIES, JobId, Story
from tests.support.backdoor import Backdoor, PostgresBackdoor, SqliteBackdoor
from tests.support.sqlite import ready_sqlite

from unstuck.config import Settings
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.workflows import WorkflowRecord
from unstuck.ledger.open import open_ledger

VIEWS = {
    "worker_status": ("worker_id", "status", "last_seen_at", "active_tasks", "minutes_since_heartbeat", "name"),
    "heartbeats": ("id", "task_id", "sender_id", "role", "sent_at", "hostname", "pid", "sender_name"),
    "attempt_status": (
        *("job_id", "token", "worker_id", "state", "claimed_at", "started_at", "ended_at", "code", "cause"),
        *("last_heartbeat_at", "heartbeat_deadline", "deadline"),
    ),
}
MEASURED = frozenset({"silent_s", "held_s", "running_s", "waited_s", "oldest_pending_s", "next_due_in_s", "in_s"})
"""Durations that go on with the clock."""
UNALIKE = frozenset({"transaction", "changed_at", "fired_at"})
"""`transaction` means something else on each database, and schedules have their times from the caller."""
IDS = frozenset({"job_id", "task_id", "last_job_id", "workflow_id"})
JOB_IN_TEXT = re.compile(r"\b(job|workflow) (\d+)\b")
WAITED = re.compile(r"(?<=waited for )\d+(\.\d+)?(?= s)")
"""How long a job waited goes on with the clock, so it is not compared."""
RESTORED = 10**12
"""After a restore ids and tokens go on from the time in microseconds."""
SOON_S = 30.0
"""A time that is further ahead is that of something planned."""


@pytest.fixture
def ledgers(tmp_path: Path, swept_pg_url: str) -> Iterator[list[tuple[Ledger, Backdoor]]]:
    opened: list[tuple[Ledger, Backdoor]] = [
        (open_ledger(Settings(url=ready_sqlite(tmp_path))), SqliteBackdoor(tmp_path / "jobs.db")),
        (open_ledger(Settings(url=swept_pg_url)), PostgresBackdoor(swept_pg_url)),
    ]
    yield opened
    for ledger, _ in opened:
        ledger.close()


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_both_databases_tell_the_same_story(story: Story, ledgers: list[tuple[Ledger, Backdoor]]) -> None:
    on_sqlite, on_postgres = (Telling(*one).told(story) for one in ledgers)
    found = list(differences(on_sqlite, on_postgres))
    assert not found, "\n".join(found)


def differences(on_sqlite: Any, on_postgres: Any, where: str = "") -> Iterator[str]:
    """Return the places at which two tellings differ, each with what both say."""
    if isinstance(on_sqlite, dict) and isinstance(on_postgres, dict):
        for key in on_sqlite | on_postgres:
            yield from differences(on_sqlite.get(key), on_postgres.get(key), f"{where}, {key}" if where else key)
    elif isinstance(on_sqlite, list) and isinstance(on_postgres, list) and len(on_sqlite) == len(on_postgres):
        for number, (one, other) in enumerate(zip(on_sqlite, on_postgres, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif on_sqlite != on_postgres:
        yield f"{where}: {on_sqlite!r} on SQLite, {on_postgres!r} on PostgreSQL"


class Telling:
    """What one ledger tells of a story, in words that do not depend on the clock or on which ids were free."""

    def __init__(self, ledger: Ledger, backdoor: Backdoor) -> None:
        self._ledger = ledger
        self._backdoor = backdoor
        self._names: dict[int, str] = {}
        """The jobs in the order in which they were enqueued: PostgreSQL leaves gaps between ids."""

    def told(self, story: Story) -> dict[str, Any]:
        """Play a story, and return each answer with all that can be seen after it."""
        found: dict[str, Any] = {}
        for number, answer in enumerate(story(self._ledger, self._backdoor), 1):
            seen = dict(self._seen())
            found[f"answer {number}"] = self._plain(answer)
            found |= {f"{what} after answer {number}": self._plain(value) for what, value in seen.items()}
        return found

    def _seen(self) -> Iterator[tuple[str, Any]]:
        jobs = [
            job for found in self._ledger.jobs.list(JobFilter()) if (job := self._ledger.jobs.get(found.id)) is not None
        ]
        jobs.sort(key=lambda job: (job.enqueued_at, job.id))
        for job in jobs:
            self._names.setdefault(job.id, f"job #{len(self._names) + 1}")
            name = self._names[job.id]
            yield name, {**msgspec.structs.asdict(job), "id": JobId(job.id)}
            yield f"attempts of {name}", self._ledger.jobs.attempts(job.id)
            yield f"outputs of {name}", self._ledger.jobs.outputs(job.id)
            yield f"links of {name}", self._ledger.jobs.links(job.id)
        yield "workers", self._ledger.workers.list()
        yield "queues", self._ledger.queues.list()
        yield "counts", self._ledger.jobs.count()
        yield "tasks", self._ledger.queues.tasks()
        yield "events", self._events()
        for view, columns in VIEWS.items():
            rows = self._backdoor.rows(f"SELECT {', '.join(columns)} FROM {view}")
            found = [dict(zip(columns, row, strict=True)) for row in rows]
            yield view, sorted(found, key=lambda row: (row.get("token", 0), row.get("id", 0), row.get("worker_id", "")))

    def _events(self) -> dict[str, list[Any]]:
        """Return the events of each job, of each worker, and of neither: what is written at once has no order."""
        found: dict[str, list[Any]] = {}
        for event in self._ledger.events.list(limit=1000):
            about = f"worker {event.worker_id}" if event.job_id is None else self._name(event.job_id)
            found.setdefault(about, []).append((event.kind, event.worker_id, event.message))
        return found

    def _name(self, job_id: int) -> str:
        return self._names.get(job_id, f"no job ({job_id})")

    def _plain(self, value: Any) -> Any:
        match value:
            case JobId():
                return self._name(value)
            case WorkflowRecord():
                return self._plain({**msgspec.structs.asdict(value), "id": JobId(value.id)})
            case msgspec.Struct():
                return self._plain(msgspec.structs.asdict(value))
            case dict():
                if "heartbeat_deadline" in value:
                    value = with_distances(value)
                return {
                    str(self._plain(key)): self._named(str(key), one)
                    for key, one in value.items()
                    if key not in UNALIKE
                }
            case list() | tuple():
                return [self._plain(found) for found in value]
            case set() | frozenset():
                return sorted((self._plain(found) for found in value), key=str)
            case str():
                text = WAITED.sub("some", value)
                return JOB_IN_TEXT.sub(lambda found: f"{found[1]} {self._name(int(found[2]))}", text)
            case _:
                return value

    def _named(self, key: str, value: Any) -> Any:
        if value is None:
            return None
        if key in IDS:
            return self._name(value)
        if key == "at" or key.endswith("_at"):
            at = value.timestamp() if isinstance(value, datetime.datetime) else value
            return "a time to come" if isinstance(at, float) and at > time.time() + SOON_S else "a time"
        if key in ("id", "token") and isinstance(value, int) and value > RESTORED:
            return "a number from the time of a restore"
        if key in MEASURED:
            return "for ever" if value == math.inf else "a while"
        if key == "minutes_since_heartbeat":
            return "minutes"
        if key == "payload" and value.startswith(b"{"):
            return self._plain(msgspec.json.decode(value))
        return self._plain(value)


def with_distances(attempt: dict[str, Any]) -> dict[str, Any]:
    """Return an attempt whose deadlines are told by what they add to the moment from which they count."""
    begins = {"heartbeat_deadline": "last_heartbeat_at", "deadline": "started_at"}
    changes = {key: distance(attempt[key], attempt[begin]) for key, begin in begins.items()}
    return {**attempt, **changes}


def distance(until: Any, since: Any) -> str | None:
    if until is None or since is None:
        return None if until is None else "since nothing"
    if isinstance(until, datetime.datetime):
        return f"{(until - since).total_seconds():.2f} s"
    return f"{until - since:.2f} s"
