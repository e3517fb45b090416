"""Name what alerts are about, and which events of the ledger they are made of."""

from collections.abc import Collection
from enum import StrEnum

import msgspec


class AlertKind(StrEnum):
    WORKER_DIED = "worker_died"
    NO_WORKERS = "no_workers"
    QUARANTINED = "quarantined"
    CRASH_LOOP = "crash_loop"
    WORKFLOW_PAUSED = "workflow_paused"
    BACKLOG_OLD = "backlog_old"
    HEARTBEAT_LATE = "heartbeat_late"
    NO_REAPER = "no_reaper"
    TASK_FAILING = "task_failing"
    SCHEDULE_FAILING = "schedule_failing"


class Phase(StrEnum):
    BEGUN = "begun"
    """Also for what has no end: a death is a death."""
    STILL = "still"
    OVER = "over"


class Topic(msgspec.Struct, frozen=True, order=True):
    """What one part of a message is about."""

    kind: AlertKind
    phase: Phase


CONDITIONS = (
    *(AlertKind.NO_WORKERS, AlertKind.BACKLOG_OLD, AlertKind.HEARTBEAT_LATE, AlertKind.NO_REAPER),
    *(AlertKind.TASK_FAILING, AlertKind.SCHEDULE_FAILING),
)
"""What begins, lasts and ends. Their events have the same name, with `_still` and `_over` for what follows."""

TOPICS = {
    "worker_dead": Topic(AlertKind.WORKER_DIED, Phase.BEGUN),
    "quarantined": Topic(AlertKind.QUARANTINED, Phase.BEGUN),
    "crash_loop": Topic(AlertKind.CRASH_LOOP, Phase.BEGUN),
    "workflow_paused": Topic(AlertKind.WORKFLOW_PAUSED, Phase.BEGUN),
    **{kind.value: Topic(kind, Phase.BEGUN) for kind in CONDITIONS},
    **{f"{kind}_still": Topic(kind, Phase.STILL) for kind in CONDITIONS},
    **{f"{kind}_over": Topic(kind, Phase.OVER) for kind in CONDITIONS},
}

IN_ORDER = (
    *(Topic(kind, Phase.BEGUN) for kind in AlertKind),
    *(Topic(kind, Phase.STILL) for kind in CONDITIONS),
    *(Topic(kind, Phase.OVER) for kind in CONDITIONS),
)
"""The news first, what is over last."""


def events_of(told: Collection[str]) -> frozenset[str]:
    """Give the kinds of events that these alerts are made of."""
    return frozenset(event for event, topic in TOPICS.items() if topic.kind in told)
