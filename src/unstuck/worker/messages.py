"""Messages that other threads send to the worker loop."""

from dataclasses import dataclass, field

from unstuck.errors import SchemaMismatch
from unstuck.ledger.contract.workers import HeartbeatAnswer, HeldRecord, Turn, TurnAnswer


@dataclass(frozen=True)
class SchemaOutdated:
    """The tables no longer have what this version uses: a newer version removed it."""

    error: SchemaMismatch


@dataclass(frozen=True)
class TurnDone:
    turn: Turn
    """What was written."""
    answer: TurnAnswer
    duration_s: float
    refused: dict[int, str] = field(default_factory=dict)
    """Attempts whose entries cannot be stored, and why."""
    deferred: Turn | None = None
    """What was not written, because another session of the database holds locks that it needs."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By token, what keeps the deferred part from being written."""


@dataclass(frozen=True)
class TurnUncertain:
    """The answer never came: whether it was written must be found out by comparing."""

    turn: Turn
    error: str
    again: bool = False
    """The turn before it failed too: it was told already."""


@dataclass(frozen=True)
class ComparisonDone:
    held: list[HeldRecord]


@dataclass(frozen=True)
class HeartbeatConfirmed:
    """A beat was confirmed; it had been sent at `sent_s` (boot time)."""

    sent_s: float
    answer: HeartbeatAnswer


@dataclass(frozen=True)
class WakeUp:
    """There may be new work."""


@dataclass(frozen=True)
class StackRequested:
    """Somebody wants to know where a job stands."""

    job_id: int
    token: int
