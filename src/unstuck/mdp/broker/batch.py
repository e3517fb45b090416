"""What the broker writes to the ledger at once, and what came of it: plain data, so that it can be simulated."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from unstuck.domain.endings import Ending
from unstuck.domain.liveness import Detector
from unstuck.ledger.contract.jobs import JobPosition, JobRecord, Outcome, Progress, TaskRecord
from unstuck.ledger.contract.workers import Claimed, HeartbeatAnswer, RemoteHeartbeat, ReplyAddress, Success
from unstuck.mdp.broker.handed_out import AbandonedWorker
from unstuck.mdp.broker.jobs import Call
from unstuck.mdp.broker.requests import ClientRequest


@dataclass(frozen=True)
class HeldClaim:
    """The attempt that a returning worker says it still holds. An earlier broker may have assigned it."""

    job_id: int
    token: int
    worker_id: str
    """The id that the worker had then."""
    owner: str | None
    """The owner that the row of that worker must have, or the claim is false."""


@dataclass(frozen=True)
class Registration:
    """A worker that said READY. The batch runner looks up its services among the known tasks."""

    worker_id: str
    name: str
    services: tuple[str, ...]
    host: str
    metadata: dict[str, Any]
    held_claim: HeldClaim | None = None
    named: bool = False
    """The worker chose its name, which no other living worker may have."""
    owner: str | None = None
    """The digest of its key. The same name and key mean the same worker."""


@dataclass(frozen=True)
class ResumedWorker:
    """A worker that came back and keeps its former id."""

    worker_id: str
    job: Claimed | None
    """The job that it holds, unless another worker has it by now."""


GONE = "its connection ended without a word"


@dataclass(frozen=True)
class WorkerDeath:
    worker_id: str
    detector: Detector
    evidence: str
    job_id: int | None
    """The job that it worked on, if that is known."""


@dataclass(frozen=True)
class LateReply:
    """A reply that came through another connection than the one its request was sent to."""

    done: Success
    owner: str | None
    """The owner that the row of its worker must have, or the reply does not count."""
    sender: bytes
    """The routing id of the sender."""


@dataclass
class WorkerTurn:
    """Outcomes and releases of one worker, and how many jobs to claim for it."""

    done: list[Success] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    release: list[Claimed] = field(default_factory=list)
    claim_count: int = 0
    """Number of jobs to claim for it."""
    is_idle: bool = False
    """The worker has no job, so the first one claimed starts at once."""
    known_held: frozenset[tuple[int, int]] = frozenset()
    """Attempts that the broker knows it to hold: (job_id, token)."""
    late_replies: list[LateReply] = field(default_factory=list)
    """Replies in its name from other senders. They count only with its key, and if it still holds their attempts."""

    @property
    def empty(self) -> bool:
        return not (self.done or self.late_replies or self.endings or self.release or self.claim_count)


@dataclass(frozen=True)
class MmiQuery:
    """A query of a client to an `mmi.` service that only the ledger can answer."""

    client: bytes
    correlation: bytes | None
    name: str
    body: tuple[bytes, ...]


class NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A call on its way to the ledger, and the place of its answer in the reply."""

    call: Call
    request: ClientRequest
    place: int
    reply_address: ReplyAddress | None
    """Only for subscribed clients. They chose their routing id, so it is theirs even after a restart."""


@dataclass
class Batch:
    registrations: list[Registration] = field(default_factory=list)
    posts: list[NewRequest] = field(default_factory=list)
    worker_turns: dict[str, WorkerTurn] = field(default_factory=dict)
    heartbeats: list[RemoteHeartbeat] = field(default_factory=list)
    deaths: list[WorkerDeath] = field(default_factory=list)
    progress_notes: list[tuple[str, Progress]] = field(default_factory=list)
    """Progress that workers report, by worker id."""
    withdrawn: list[Registration] = field(default_factory=list)
    """Workers that left before they were registered. If the ledger has them from before, they are dead."""
    retired: list[str] = field(default_factory=list)
    stale_registrations: list[str] = field(default_factory=list)
    """Ids that workers had at an earlier broker. They register again, so these registrations are over."""
    answered: list[int] = field(default_factory=list)
    """Jobs whose replies were sent, so that their reply addresses can go."""
    to_poll: list[int] = field(default_factory=list)
    """Jobs that clients wait for and that no worker of this broker holds."""
    overdue: list[int] = field(default_factory=list)
    """Jobs that no worker claimed within `mdp.request_ttl`."""
    resubscribed: list[bytes] = field(default_factory=list)
    """Clients that subscribed (again). Their unanswered requests are looked up."""
    queries: list[MmiQuery] = field(default_factory=list)
    abandoned: list[AbandonedWorker] = field(default_factory=list)
    """Old workers whose broker died, with jobs that it held for them."""
    retried: "Batch | None" = None
    """What was deferred earlier because another session held a lock. It is done last."""

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())

    def concerns(self, worker_id: str) -> bool:
        """Return whether this batch has the registration or a turn of a worker, which its end must follow."""
        return worker_id in self.worker_turns or any(
            registration.worker_id == worker_id for registration in self.registrations
        )


class Stored(msgspec.Struct, frozen=True, gc=False):
    job_id: int
    fresh: bool
    unserved: bool
    """No living worker serves it."""


@dataclass
class BatchResult:
    resumed: dict[str, ResumedWorker] = field(default_factory=dict)
    """By the id of their registration, for which no row was written."""
    refused_registrations: list[tuple[Registration, str, str]] = field(default_factory=list)
    """Workers that were not registered, each with an error code (`protocol.NAME_TAKEN`, …) and a message."""
    stored: list[Stored | None] = field(default_factory=list)
    """In the order of `Batch.posts` after the batch was done. None: it cannot be stored."""
    claimed: dict[str, tuple[Claimed, ...]] = field(default_factory=dict)
    """By worker."""
    superseded: set[tuple[int, int]] = field(default_factory=set)
    """Replies whose token is no longer valid."""
    refused_replies: int = 0
    """Number of late replies to attempts that their workers do not hold."""
    forged: list[bytes] = field(default_factory=list)
    """Senders of late replies without the key of the worker in whose name they came."""
    gone: set[str] = field(default_factory=set)
    """Workers that are dead or stopped in the ledger."""
    heartbeat_answers: dict[str, HeartbeatAnswer] = field(default_factory=dict)
    deaths: list[tuple[WorkerDeath, JobRecord | None]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    """Jobs that were cancelled because no worker claimed them in time."""
    positions: list[JobPosition] = field(default_factory=list)
    reply_addresses: dict[bytes, list[ReplyAddress]] = field(default_factory=dict)
    replies: list[tuple[MmiQuery, list[bytes]]] = field(default_factory=list)
    tasks: dict[str, TaskRecord] | None = None
    """All known tasks, if they were read."""
    deferred: Batch = field(default_factory=Batch)
    """What was left out of the batch because another session holds a lock. It must be retried."""
    retried: "BatchResult | None" = None
    """Of `Batch.retried`."""
