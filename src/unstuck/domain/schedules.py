"""Describe a schedule as its app or an operator defined it, and know it again by its fingerprint."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from unstuck.domain.catching_up import CatchUp
from unstuck.domain.ticking import Timing

Source = Literal["app", "operator"]
FINGERPRINT_CHARS = 20


class ScheduleDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    task: str
    queue: str
    timing: Timing
    job: bytes
    """The job that is enqueued at each tick, as the store packs it: opaque here."""
    catch_up: CatchUp = "latest"

    @property
    def fingerprint(self) -> str:
        """Change when anything in it changes: a worker fires only what it knows exactly so."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:FINGERPRINT_CHARS]


def is_known_to(metadata: Mapping[str, object], fingerprint: str) -> bool:
    """Return whether a worker that describes itself so has exactly this definition in its code."""
    told = metadata.get("schedules")
    return isinstance(told, list) and fingerprint in told


def tick_text(tick: float) -> str:
    """Write a tick the way it is shown: 2026-11-17T12:00:00Z."""
    moment = datetime.fromtimestamp(tick, UTC)
    return moment.isoformat(timespec="seconds" if not moment.microsecond else "milliseconds").replace("+00:00", "Z")


def enqueued_by(name: str, tick: float) -> str:
    """Say who enqueued a job, for its story."""
    return f"schedule {name} for {tick_text(tick)}"
