"""Name the screens: each has a template, live fragments, and a look that gives what both need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unstuck.client.operator import Operator
from unstuck.domain.redaction import Redactor
from unstuck.domain.states import LIVE_STATES, WorkerState
from unstuck.http.dashboard.charts import MINUTES, Charts
from unstuck.http.dashboard.snapshot import Snapshot, SnapshotCache
from unstuck.http.services import Services

MAX_KEY_CHARS = 200


class View:
    """What screens look through: the shared snapshot, and the operator's questions for what it does not hold."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.charts = Charts()
        self.redact = Redactor(services.http.redact)
        self.snapshots = SnapshotCache(
            lambda: services.ledger,
            lambda: self.operator().activity(MINUTES),
            lambda: tuple(self.operator().doctor()),
        )

    def operator(self, by: str = "page") -> Operator:
        return Operator(self._services.ledger, self._services.settings, by=by, via="page")

    @property
    def services(self) -> Services:
        return self._services

    def snapshot(self) -> Snapshot:
        return self.snapshots.snapshot()


Look = Callable[[View, str], dict[str, Any]]


@dataclass(frozen=True)
class Page:
    """One screen. Fragments are parts that change while somebody looks: their id, and their template."""

    name: str
    template: str
    data: Look
    fragments: Mapping[str, str] = field(default_factory=dict)

    def values(self, viewing: View, key: str = "") -> dict[str, Any]:
        return {**common(viewing.snapshot()), **self.data(viewing, key)}


EVERYWHERE = {"nav-counts": "parts/nav.html"}
"""Fragments of every screen."""


def common(seen: Snapshot) -> dict[str, Any]:
    """Give what the frame around every screen shows."""
    living = [worker for worker in seen.workers if worker.state in LIVE_STATES]
    troubled = any(worker.state is WorkerState.SUSPECT for worker in living)
    problems = [finding for finding in seen.findings or () if finding.severity == "problem"]
    return {
        "seen": seen,
        "counts": {
            "workers": len(living),
            "workers_troubled": troubled,
            "quarantined": seen.quarantined,
            "problems": len(problems),
        },
    }
