"""Schedules: records and protocol."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from unstuck.domain.schedules import CatchUp, ScheduleDefinition, Source, Timing
from unstuck.ledger.contract.jobs import NewJob


class ScheduleRecord(msgspec.Struct, frozen=True):
    name: str
    source: Source
    """`app`: it stands in the code of an app, and only workers with that code fire it. `operator`: any worker may."""
    fingerprint: str
    task: str
    queue: str
    timing: Timing
    catch_up: CatchUp
    job: bytes
    """What is enqueued at each tick (see `unpack_job`)."""
    paused: bool
    paused_by: str | None
    next_at: float | None
    """None: just begun or resumed; whoever keeps the clock next works it out."""
    last_at: float | None
    """Its last tick, as the clock of the schedule has it."""
    fired_at: float | None
    """When that was really enqueued."""
    last_job_id: int | None
    version: int
    """Grows with every change: the fence of `Schedules.fire`."""
    changed_at: float
    """When its definition was written last."""


FIRE_WAIT_S = 0.1
"""How long firing a schedule waits for a lock, a held unique key for instance, unless told otherwise."""


class DueSchedules(msgspec.Struct, frozen=True):
    now: float
    """The ledger's time, by which all of it is judged."""
    due: tuple[ScheduleRecord, ...]
    next_in_s: float | None
    """When the next of the others is due."""
    complete: bool = True
    """Whether `due` holds all that are due: a limited number is read in one go."""


class Firing(msgspec.Struct, frozen=True):
    """What a tick brings: written only where the schedule is still as it was when it was read."""

    name: str
    version: int
    next_at: float | None
    last_at: float | None
    """None: as it was."""
    jobs: tuple[NewJob, ...] = ()
    event: str | None = None
    message: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NewJob)


def pack_job(job: NewJob) -> bytes:
    """Pack what is enqueued at each tick."""
    return _encoder.encode(job)


def unpack_job(packed: bytes) -> NewJob:
    return _decoder.decode(packed)


class Schedules(Protocol):
    """Keep the definitions of schedules, and enqueue exactly once per tick."""

    def know(self, definitions: Sequence[ScheduleDefinition], source: Source) -> list[str]:
        """Write definitions down; one that changed takes the place of the old one, and where its times changed it
        begins anew. Gives the names of those that are new or changed. A pause stays."""
        ...

    def differing(self, known: Mapping[str, str]) -> list[tuple[ScheduleRecord, bool]]:
        """Return the schedules of apps that have another fingerprint than the one given for their name, each with
        whether a living worker knows it as it is."""
        ...

    def restore(self, definition: ScheduleDefinition, replaces: str, message: str) -> bool:
        """Write the definition of an app down again, with an event, if the one with this fingerprint is in force and an
        app made it. Return False if it is not. A pause stays."""
        ...

    def due(self, fingerprints: Collection[str], after: Sequence[str] = ()) -> DueSchedules:
        """Return the schedules that need attention now: due, just begun, or ahead of the clock.

        Of those with these fingerprints and those that operators made. Paused ones are left out. Those named in `after`
        come last, in that order."""
        ...

    def fire(self, firing: Firing, wait_s: float = FIRE_WAIT_S) -> list[int] | None:
        """Enqueue the jobs of a tick and move the schedule on, in one commit, if nobody did since this version was
        read; else None. Gives the ids of the jobs (of one with the same unique key, where that is unfinished).
        Raises LedgerBusy if another session has held a lock that it needs for longer than `wait_s`."""
        ...

    def pause(self, name: str, paused: bool, by: str) -> bool:
        """Pause a schedule, or resume it from now, with an event. Return False if it is so already or is missing."""
        ...

    def remove(self, name: str, by: str) -> bool:
        """Remove a schedule, with an event. What it enqueued stays."""
        ...

    def list(self) -> list[ScheduleRecord]:
        """Return every schedule, by name."""
        ...
