"""Hold the story of one job as facts that every door can show: CLI, page, alert."""

from enum import StrEnum
from typing import Any

import msgspec

from unstuck.client import views
from unstuck.store.records import JobRecord


class StepKind(StrEnum):
    """What a step of the story tells of, as one word for machines."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    """In the hands of a worker, not started yet."""
    STARTED = "started"
    PROGRESS = "progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised, or what it returned cannot be stored."""
    DIED = "died"
    """The process of the attempt died, or was lost."""
    ENDED = "ended"
    """We ended the attempt: deadline, stall, memory limit, lease."""
    DRAINED = "drained"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    """Which rule was applied, and why."""
    TOLD = "told"
    """Who was told how it ended."""
    SUSPENDED = "suspended"
    """It gave its slot back, and waited for a time or a signal."""
    STEP = "step"
    """It wrote something down: a step, a sleep, a signal, its checkpoint."""
    OPERATOR = "operator"
    """Somebody did something by hand."""
    EVENT = "event"
    """Any other event of the job."""
    LEFT_OUT = "left_out"


class Quote(msgspec.Struct, frozen=True):
    """Something to show as it was written: a stack, the last lines of an output."""

    title: str
    text: str


class Step(msgspec.Struct, frozen=True):
    """One thing that happened."""

    at: float
    """Seconds since 1970."""
    kind: StepKind
    text: str
    """Whole sentences for people."""
    facts: dict[str, Any] = {}
    """The same for machines, and more; what is not known is left out."""
    quotes: tuple[Quote, ...] = ()
    """Long texts that belong to it; all of them are in `facts` too."""


class Action(msgspec.Struct, frozen=True):
    """What an operator can do now."""

    command: str
    why: str


class Story(msgspec.Struct, frozen=True):
    """All that is known of a job, in order of time."""

    job: JobRecord
    told_at: float
    headline: str
    steps: tuple[Step, ...]
    next: str
    actions: tuple[Action, ...]


def story_view(story: Story) -> views.View:
    """Give a story as plain values; the fields are a contract: they are only added to."""
    return {
        "job": views.job_summary(story.job),
        "told_at": views.instant(story.told_at),
        "headline": story.headline,
        "story": [
            {"at": views.instant(step.at), "kind": step.kind.value, "text": step.text, "facts": step.facts}
            for step in story.steps
        ],
        "next": story.next,
        "actions": [{"command": action.command, "why": action.why} for action in story.actions],
    }
