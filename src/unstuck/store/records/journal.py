"""What people read of the way of a job: what it wrote down, and the signals that it was sent."""

import msgspec


class JournalRecord(msgspec.Struct, frozen=True):
    seq: int
    """Its place, from 1; 0 is the checkpoint."""
    kind: str
    name: str
    value: bytes
    """JSON."""
    at: float
    token: int
    """The attempt that wrote it."""


class SignalRecord(msgspec.Struct, frozen=True):
    number: int
    name: str
    value: bytes
    """JSON."""
    at: float
    sent_by: str
    taken_seq: int | None
    """The entry by which the job took it; None while it is kept."""
