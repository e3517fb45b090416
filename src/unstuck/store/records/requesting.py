"""Requests that must not be done twice, by a key that their caller chose."""

import msgspec

from unstuck.store.records.handing import Enqueued


class Request(msgspec.Struct, frozen=True):
    key: bytes
    """A hash of who asks and of their key."""
    fingerprint: bytes
    """A hash of what is asked for."""
    keep_s: float
    """How long it counts as the same request."""


class OnceAnswer(msgspec.Struct, frozen=True):
    stored: tuple[Enqueued, ...]
    """What the first request with this key stored, and what it was told; empty where that asked for something else."""
    repeated: bool
    """This was not the first."""
