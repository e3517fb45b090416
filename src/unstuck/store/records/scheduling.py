"""What the ledger keeps of schedules, and what those who keep the clock hand in."""

import msgspec

from unstuck.domain.catching_up import CatchUp
from unstuck.domain.schedules import Source
from unstuck.domain.ticking import Timing
from unstuck.store.records.handing import NewJob


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
    """Grows with every change: the fence of `fire_schedule`."""
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
