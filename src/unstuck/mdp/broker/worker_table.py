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
    connection: int | None
    """Its connection, where that is known."""
    seen_s: float
    told_s: float
    """When we last said something to it."""
    key: str = ""
    """The secret in its addresses; see `request_addresses.py`."""
    host: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    is_registered: bool = False
    assignment: Assignment | None = None
    settled: int = 0
    """Since its last beat in the ledger."""
    asking: bool = False
    """A job is being looked for on its behalf."""
    prefetched: deque[Claimed] = field(default_factory=deque)
    """What is its own already, and lies here until it has done what it does."""
    piled_s: float = 0.0
    """When something was last laid there."""
    reach: int = 0
    """How high its pile may be."""
    satisfied: bool = False
    """The last look found as many as were looked for."""
    is_draining: bool = False
    """It gets no more jobs."""
    is_unstuck_worker: bool = False
    """It told about itself, as our own workers do."""
    draining: bool = False
    """It said so itself."""
    empty_handed: bool = False
    """The last look found nothing; it is asked again when something may have come."""
    holding: bytes | None = None
    """The address that it came back with: until the ledger has said whose that job is, and longer if not its own."""
    early_messages: list[Message] = field(default_factory=list)
    """What it said of that meanwhile."""

    @property
    def free(self) -> bool:
        """It can take a job, and none is being looked for on its behalf."""
        return (
            self.is_registered
            and self.assignment is None
            and self.holding is None
            and not (self.asking or self.is_draining or self.empty_handed)
        )


class WorkerTable:
    def __init__(self) -> None:
        self._by_identity: dict[bytes, ConnectedWorker] = {}
        self._by_id: dict[str, ConnectedWorker] = {}
        self._by_key: dict[str, ConnectedWorker] = {}
        self._by_connection: dict[int, set[bytes]] = {}
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

    def on_connection(self, connection: int) -> list[ConnectedWorker]:
        return [self._by_identity[identity] for identity in self._by_connection.get(connection, ())]

    def add(self, worker: ConnectedWorker) -> None:
        self._by_identity[worker.identity] = worker
        self._by_id[worker.worker_id] = worker
        self._by_key[worker.key] = worker
        for service in worker.services:
            self._by_service.setdefault(service, {})[worker.worker_id] = worker
        if worker.connection is not None:
            self._by_connection.setdefault(worker.connection, set()).add(worker.identity)

    def remove(self, worker: ConnectedWorker) -> None:
        self._by_id.pop(worker.worker_id, None)
        if self._by_key.get(worker.key) is worker:
            del self._by_key[worker.key]
        for service in worker.services:
            several = self._by_service.get(service, {})
            several.pop(worker.worker_id, None)
            if not several:
                self._by_service.pop(service, None)
        if self._by_identity.get(worker.identity) is worker:
            del self._by_identity[worker.identity]
        if worker.connection is not None and worker.connection in self._by_connection:
            self._by_connection[worker.connection].discard(worker.identity)
            if not self._by_connection[worker.connection]:
                del self._by_connection[worker.connection]

    def rename(self, worker: ConnectedWorker, worker_id: str, key: str) -> None:
        """It is known to the ledger by another id, and perhaps by another key."""
        self.remove(worker)
        worker.worker_id, worker.key = worker_id, key
        self.add(worker)

    def move(self, worker: ConnectedWorker, identity: bytes, connection: int | None) -> None:
        """It came back through another connection."""
        self.remove(worker)
        worker.identity, worker.connection = identity, connection
        self.add(worker)

    def serves(self, service: str) -> bool:
        return any(not worker.is_draining for worker in self._by_service.get(service, {}).values())

    def wake_one(self, service: str) -> None:
        """Something has come for this service: one with a free hand looks for it."""
        for worker in self._by_service.get(service, {}).values():
            if worker.empty_handed:
                worker.empty_handed = False
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
