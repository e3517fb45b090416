"""What keeps order in queues: lines, limits, and what is known of a job beside its work."""

import msgspec

from unstuck.domain.limits import QueueLimit


class InLine(msgspec.Struct, frozen=True):
    """A job that has a place in a line."""

    job_id: int
    state: str
    queue: str


class LineRecord(msgspec.Struct, frozen=True):
    key: str
    places: int
    pinned_by: str | None
    """The operator who chose the number; None: what was enqueued last did."""
    blocked: int
    """How many wait to be let in."""
    holders: tuple[InLine, ...]


class QueueLimitRecord(msgspec.Struct, frozen=True):
    name: str
    limit: QueueLimit
    limited_by: str | None
    """The operator who chose it, also where they chose no limit; None: an app declared it."""
    held: int
    """In hand now."""
    room: int
    """So many may be taken now."""
    in_s: float | None
    """When the rate allows the next one, where that is what is missing."""


class TiesRecord(msgspec.Struct, frozen=True):
    """What few jobs have beside their work."""

    line: str | None = None
    line_limit: int | None = None
    blocked: bool = False
    expires_at: float | None = None
    keep_s: float | None = None
    unique_for: str | None = None
    workflow_id: int | None = None
    place: int | None = None
    awaits: str | None = None


class Tended(msgspec.Struct, frozen=True):
    next_after: str | None
    """Where to go on; None: it was the end."""
    repaired: int
    removed: int
    queues: frozenset[str]


class Expired(msgspec.Struct, frozen=True):
    count: int
    queues: frozenset[str]
    """In which others became ready by it."""
    next_in_s: float | None
