"""Answer in one sentence whether everything is all right, and if not, what is worst."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unstuck.client.doctor.codes import Severity
from unstuck.client.doctor.finding import Finding
from unstuck.domain.failing import percent
from unstuck.domain.states import LIVING, JobState, WorkerState
from unstuck.http.page.deaths import Death
from unstuck.http.page.snapshot import Snapshot
from unstuck.http.page.words import capital, count
from unstuck.notify.failures import FAILED

JUST_NOW_S = 300.0

Level = Literal["good", "warning", "problem", "unknown"]
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Health:
    level: Level
    sentence: str
    cure: str = ""
    also: str = ""
    """Who died a moment ago, where something else is worse."""
    more: int = 0
    """Further findings of the doctor."""
    facts: Facts = ()
    """Figures with their labels."""


def sum_up(seen: Snapshot, deaths: Sequence[Death]) -> Health:
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
        return Health("problem", at_a_glance, cure, died, len(warnings), facts)
    if not any(worker.state in LIVING for worker in seen.workers):
        cure = "Start one with `unstuck worker module:app`."
        if any(queue.pending for queue in seen.queues):
            return Health("problem", "Jobs wait, and no worker is alive.", cure, died, 0, facts)
        return Health("unknown", "No worker is alive, and no job waits.", cure, died, 0, facts)
    if died:
        return Health("warning", died, "", "", len(warnings), facts)
    if warnings:
        return _of(warnings[0], "warning", "", len(warnings) - 1, facts)
    if seen.findings is None:
        # He sees what no glance does: tasks that no worker knows, timeouts that are too tight.
        return Health("unknown", "Nothing is wrong at a glance; the doctor is still looking.", "", "", 0, facts)
    return Health("good", "Everything is all right.", "", "", 0, facts)


def _of(finding: Finding, level: Level, died: str, more: int, facts: Facts) -> Health:
    sentence = capital(finding.what.rstrip("."))
    return Health(level, f"{sentence}.", finding.cure, died, more, facts)


def _suspects(seen: Snapshot) -> str:
    suspects = [worker.name for worker in seen.workers if worker.state is WorkerState.SUSPECT]
    if not suspects:
        return ""
    named = ", ".join(suspects[:3]) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
    return f"{count(len(suspects), 'worker')} fell silent: {named}."


def _died(deaths: Sequence[Death], since: float) -> str:
    """Say how many died, and of what the last one did: the newest comes first."""
    numbers = {what: sum(death.since(since) for death in deaths if death.what == what) for what in ("worker", "runner")}
    parts = [count(number, what) for what, number in numbers.items() if number]
    newest = deaths[0]
    last = f"worker {newest.names[0].text}" if newest.what == "worker" else f"a runner of {newest.task or 'a job'}"
    return f"{' and '.join(parts)} died in the last five minutes, lately {last}: {newest.cause}."


def _facts(seen: Snapshot, deaths: Sequence[Death]) -> Facts:
    living = sum(worker.state in LIVING for worker in seen.workers)
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
