"""What the broker wants of the ledger in one round, and what it hears back: plain data, so that it can be simulated."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from unstuck.domain.endings import Ending
from unstuck.domain.liveness import Detector
from unstuck.ledger.contract.events import JobPosition
from unstuck.ledger.contract.jobs import JobRecord, Outcome, TaskRecord
from unstuck.ledger.contract.workers import Claimed, HeartbeatAnswer, Progress, RemoteHeartbeat, ReplyAddress, Success
from unstuck.mdp.broker.handed_out import Abandoned
from unstuck.mdp.broker.jobs import Call
from unstuck.mdp.broker.requests import ClientRequest


@dataclass(frozen=True)
class HeldClaim:
    """What a worker says that it still works on, or could not hand in: whoever gave it may be an earlier broker."""

    job_id: int
    token: int
    worker_id: str
    """Who it was then."""
    owner: str | None
    """What the row of that worker must say for this to be true."""


@dataclass(frozen=True)
class Registration:
    """A worker that said READY. Its services are found among the known tasks by whoever writes it down."""

    worker_id: str
    name: str
    services: tuple[str, ...]
    host: str
    metadata: dict[str, Any]
    holding: HeldClaim | None = None
    named: bool = False
    """It said its name itself, which no other living worker may have."""
    owner: str | None = None
    """The digest of its key: with the same name and key it is the same worker."""


@dataclass(frozen=True)
class ResumedWorker:
    """A worker came back and is who it was."""

    worker_id: str
    job: Claimed | None
    """What it holds, if that is still its own."""


GONE = "its connection ended without a word"


@dataclass(frozen=True)
class WorkerDeath:
    worker_id: str
    detector: Detector
    evidence: str
    job_id: int | None
    """What it worked on, as far as we know."""


@dataclass(frozen=True)
class Late:
    """A reply that came from another connection than its request went to."""

    done: Success
    owner: str | None
    """What the row of its worker must say for this to count."""
    sender: bytes
    """The routing id that it came from."""


@dataclass
class WorkerTurn:
    """What one worker hands in, and whether it has a hand free."""

    done: list[Success] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    release: list[Claimed] = field(default_factory=list)
    claim_count: int = 0
    """So many jobs are looked for on its behalf."""
    is_idle: bool = False
    """It waits for the first of them."""
    known_held: frozenset[tuple[int, int]] = frozenset()
    """What we know to be its own already: (job_id, token)."""
    late: list[Late] = field(default_factory=list)
    """Replies in its name that came from others: they count only with its key, and if it holds what they answer."""

    @property
    def empty(self) -> bool:
        return not (self.done or self.late or self.endings or self.release or self.claim_count)


@dataclass(frozen=True)
class MmiQuery:
    """Something that only the ledger knows, asked by a client through `mmi.`."""

    client: bytes
    correlation: bytes | None
    name: str
    body: tuple[bytes, ...]


class NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A call on its way to the ledger, and where its answer goes."""

    call: Call
    asked: ClientRequest
    place: int
    reply_address: ReplyAddress | None
    """Only for clients whose identity is their own: it is theirs also after a restart."""


@dataclass
class Batch:
    registrations: list[Registration] = field(default_factory=list)
    posts: list[NewRequest] = field(default_factory=list)
    worker_turns: dict[str, WorkerTurn] = field(default_factory=dict)
    heartbeats: list[RemoteHeartbeat] = field(default_factory=list)
    deaths: list[WorkerDeath] = field(default_factory=list)
    notes: list[tuple[str, Progress]] = field(default_factory=list)
    """How far workers say they are."""
    withdrawn: list[Registration] = field(default_factory=list)
    """Workers that left before they were registered: if they stand in the ledger from before, they are dead."""
    retired: list[str] = field(default_factory=list)
    stale_registrations: list[str] = field(default_factory=list)
    """Workers of an earlier broker that come anew: what stands in the ledger under their old ids is over."""
    answered: list[int] = field(default_factory=list)
    """Jobs whose letters were answered."""
    look_at: list[int] = field(default_factory=list)
    """Jobs that somebody waits for and that none of our workers holds."""
    overdue: list[int] = field(default_factory=list)
    """Jobs that nobody took in time."""
    returned: list[bytes] = field(default_factory=list)
    """Clients that came (back): what is still unanswered of theirs?"""
    questions: list[MmiQuery] = field(default_factory=list)
    abandoned: list[Abandoned] = field(default_factory=list)
    """Old workers whose broker died: what it kept for them is settled."""
    again: "Batch | None" = None
    """What was deferred before because another session held a lock. It is done last."""

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())

    def concerns(self, worker_id: str) -> bool:
        """Return whether a worker's birth or what it did stands here: its end comes after that."""
        return worker_id in self.worker_turns or any(
            registration.worker_id == worker_id for registration in self.registrations
        )


class Stored(msgspec.Struct, frozen=True, gc=False):
    job_id: int
    fresh: bool
    unserved: bool
    """Nobody lives who would take it."""


@dataclass
class BatchResult:
    resumed: dict[str, ResumedWorker] = field(default_factory=dict)
    """By the id that they came with; no row was made for that."""
    turned_away: list[tuple[Registration, str, str]] = field(default_factory=list)
    """Workers that were not registered, with why (`protocol.NAME_TAKEN`, …) and what to tell them."""
    stored: list[Stored | None] = field(default_factory=list)
    """In the order of the posts as the order has them then; None for one that cannot be stored."""
    claimed: dict[str, tuple[Claimed, ...]] = field(default_factory=dict)
    """By worker."""
    superseded: set[tuple[int, int]] = field(default_factory=set)
    """Replies whose token no longer stands."""
    refused: int = 0
    """Late replies in the name of workers that do not hold what they answer."""
    forged: list[bytes] = field(default_factory=list)
    """Who sent late replies without the key of the worker in whose name they came."""
    gone: set[str] = field(default_factory=set)
    """Workers that are dead or stopped in the ledger."""
    beats: dict[str, HeartbeatAnswer] = field(default_factory=dict)
    deaths: list[tuple[WorkerDeath, JobRecord | None]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    """Cancelled, since nobody took them in time."""
    glances: list[JobPosition] = field(default_factory=list)
    reply_addresses: dict[bytes, list[ReplyAddress]] = field(default_factory=dict)
    replies: list[tuple[MmiQuery, list[bytes]]] = field(default_factory=list)
    tasks: dict[str, TaskRecord] | None = None
    """The tasks that are known, when they were read anew."""
    left: Batch = field(default_factory=Batch)
    """What was taken out of the order and not done, because another session holds a lock: ask for it again."""
    again: "BatchResult | None" = None
    """To what was deferred before."""
