"""Know the workers that said READY: by their identity, by their line, and by the id that they have in the ledger."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unstuck.domain.endings import MAX_MESSAGE_CHARS, Attempt, storable_text
from unstuck.domain.policy import decode_policy
from unstuck.ledger.contract.workers import Claimed, Progress
from unstuck.mdp.protocol import Message

MOST = 1e15


@dataclass(eq=False)
class Assignment:
    """What a worker works on."""

    job: Claimed
    address: bytes
    service: str
    since_s: float

    def attempt(self) -> Attempt:
        return Attempt(
            self.job.job_id, self.job.token, decode_policy(self.job.policy), self.job.failures, self.job.crashes
        )


@dataclass(eq=False)
class ConnectedWorker:
    identity: bytes
    worker_id: str
    name: str
    services: tuple[str, ...]
    line: int | None
    """Its connection, where that is known."""
    seen_s: float
    told_s: float
    """When we last said something to it."""
    key: str = ""
    """The secret in its addresses; see `addresses.py`."""
    host: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    born: bool = False
    doing: Assignment | None = None
    settled: int = 0
    """Since its last beat in the ledger."""
    asking: bool = False
    """A job is being looked for on its behalf."""
    pile: deque[Claimed] = field(default_factory=deque)
    """What is its own already, and lies here until it has done what it does."""
    piled_s: float = 0.0
    """When something was last laid there."""
    reach: int = 0
    """How high its pile may be."""
    satisfied: bool = False
    """The last look found as many as were looked for."""
    leaving: bool = False
    """It gets no more jobs."""
    ours: bool = False
    """It told about itself, as our own workers do."""
    draining: bool = False
    """It said so itself."""
    empty_handed: bool = False
    """The last look found nothing; it is asked again when something may have come."""
    holding: bytes | None = None
    """The address that it came back with: until the ledger has said whose that job is, and longer if not its own."""
    early: list[Message] = field(default_factory=list)
    """What it said of that meanwhile."""

    @property
    def free(self) -> bool:
        """It can take a job, and none is being looked for on its behalf."""
        return (
            self.born
            and self.doing is None
            and self.holding is None
            and not (self.asking or self.leaving or self.empty_handed)
        )


class WorkerTable:
    def __init__(self) -> None:
        self._by_identity: dict[bytes, ConnectedWorker] = {}
        self._by_id: dict[str, ConnectedWorker] = {}
        self._by_key: dict[str, ConnectedWorker] = {}
        self._by_line: dict[int, set[bytes]] = {}
        self._by_service: dict[str, dict[str, ConnectedWorker]] = {}

    def __iter__(self) -> Iterator[ConnectedWorker]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def by_identity(self, identity: bytes) -> ConnectedWorker | None:
        return self._by_identity.get(identity)

    def by_id(self, worker_id: str) -> ConnectedWorker | None:
        return self._by_id.get(worker_id)

    def by_key(self, key: str) -> ConnectedWorker | None:
        return self._by_key.get(key)

    def on_line(self, line: int) -> list[ConnectedWorker]:
        return [self._by_identity[identity] for identity in self._by_line.get(line, ())]

    def add(self, peer: ConnectedWorker) -> None:
        self._by_identity[peer.identity] = peer
        self._by_id[peer.worker_id] = peer
        self._by_key[peer.key] = peer
        for service in peer.services:
            self._by_service.setdefault(service, {})[peer.worker_id] = peer
        if peer.line is not None:
            self._by_line.setdefault(peer.line, set()).add(peer.identity)

    def remove(self, peer: ConnectedWorker) -> None:
        self._by_id.pop(peer.worker_id, None)
        if self._by_key.get(peer.key) is peer:
            del self._by_key[peer.key]
        for service in peer.services:
            several = self._by_service.get(service, {})
            several.pop(peer.worker_id, None)
            if not several:
                self._by_service.pop(service, None)
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]
        if peer.line is not None and peer.line in self._by_line:
            self._by_line[peer.line].discard(peer.identity)
            if not self._by_line[peer.line]:
                del self._by_line[peer.line]

    def rename(self, peer: ConnectedWorker, worker_id: str, key: str) -> None:
        """It is known to the ledger by another id, and perhaps by another key."""
        self.remove(peer)
        peer.worker_id, peer.key = worker_id, key
        self.add(peer)

    def move(self, peer: ConnectedWorker, identity: bytes, line: int | None) -> None:
        """It came back through another connection."""
        self.remove(peer)
        peer.identity, peer.line = identity, line
        self.add(peer)

    def serves(self, service: str) -> bool:
        return any(not peer.leaving for peer in self._by_service.get(service, {}).values())

    def wake_one(self, service: str) -> None:
        """Something has come for this service: one with a free hand looks for it."""
        for peer in self._by_service.get(service, {}).values():
            if peer.empty_handed:
                peer.empty_handed = False
                return


def progress_of(worker_id: str, doing: Assignment, about: dict[str, Any], at: float) -> list[tuple[str, Progress]]:
    """Read how far a worker says it is; nothing where it says nothing that makes sense."""
    done, total, message = about.get("done"), about.get("total"), about.get("message", "")
    if _number(done) is None and not (isinstance(message, str) and message):
        return []
    note = Progress(
        doing.job.job_id,
        doing.job.token,
        at,
        _number(done),
        _number(total),
        storable_text(message, MAX_MESSAGE_CHARS) if isinstance(message, str) else "",
    )
    return [(worker_id, note)]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if plain else None
