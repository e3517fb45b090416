"""What a broker hands to the ledger in one go, and where the answers to its jobs are sent."""

import msgspec

from unstuck.store.records.handing import BeatAnswer, Enqueued, ForeignPulse, NewJob, Turn, TurnAnswer
from unstuck.store.records.requesting import Request


class Letter(msgspec.Struct, frozen=True):
    """Where the answer to a job goes."""

    client: bytes
    """The identity that the client chose: 16 to 255 bytes."""
    service: str
    request_id: str
    """The same for all calls that came in one request."""
    place: int = 0
    """Of this call in its request, from 0."""
    places: int = 1
    """How many calls came in that request."""
    correlation: bytes | None = None
    own_id: str | None = None
    """What the client calls this job."""
    notify: bool = False
    """The client wants to hear of deaths."""
    job_id: int = 0
    """Given by the ledger."""
    answered_at: float | None = None
    """Given by the ledger."""


class OnceJob(msgspec.Struct, frozen=True):
    """A job that must not be stored again where its request was seen before, also when the job has ended since."""

    request: Request
    job: NewJob
    letter: Letter | None = None


class Exchange(msgspec.Struct, frozen=True):
    """What happened at a broker between two looks at its sockets: all of it is one commit.

    Done in this order: answered, jobs, once, pulses, turns. So a job that comes in can be claimed at once, and a letter
    that is answered is never the one that replaces it. On PostgreSQL beats may be a commit of their own before it, and
    who stands in a line is let in when the turns are over: locks have an order."""

    jobs: tuple[NewJob, ...] = ()
    letters: tuple[Letter | None, ...] = ()
    """Those of `jobs`, at the same places; empty where none of them has one."""
    once: tuple[OnceJob, ...] = ()
    turns: tuple[Turn, ...] = ()
    pulses: tuple[ForeignPulse, ...] = ()
    answered: tuple[int, ...] = ()
    """Jobs whose letters need no answer any more."""


class ExchangeAnswer(msgspec.Struct, frozen=True):
    enqueued: tuple[Enqueued, ...] = ()
    once: tuple[Enqueued | None, ...] = ()
    """None: the key came with something else before, and nothing was stored."""
    turns: tuple[TurnAnswer, ...] | None = ()
    """None: their answer was lost, and they were done or not, all of them. Compare what is held, and go on. All the
    rest is known to have happened."""
    beats: tuple[BeatAnswer, ...] = ()
