"""Connected workers, by routing id, connection, key, service and id in the ledger."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unstuck.domain.endings import MAX_MESSAGE_CHARS, Attempt, storable_text
from unstuck.domain.policy import decode_policy
from unstuck.ledger.contract.jobs import Progress
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.protocol import Message

MOST = 1e15


@dataclass(eq=False)
class Assignment:
    """The job that a worker has, and the address of the request."""

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
    """File descriptor of its connection, if known."""
    seen_s: float
    sent_s: float
    """When it was last sent a message."""
    key: str = ""
    """The secret in its addresses; see `request_addresses.py`."""
    host: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    is_registered: bool = False
    assignment: Assignment | None = None
    settled: int = 0
    """Replies since its last heartbeat in the ledger."""
    is_claiming: bool = False
    """A claim for it is in flight."""
    prefetched: deque[Claimed] = field(default_factory=deque)
    """Jobs claimed for it that it gets after the one that it has."""
    prefetched_s: float = 0.0
    """When jobs were last prefetched."""
    prefetch_depth: int = 0
    """Number of jobs that may be prefetched for it."""
    found_enough: bool = False
    """The last claim got as many jobs as it wanted."""
    is_draining: bool = False
    """It gets no more jobs."""
    is_unstuck_worker: bool = False
    """It described itself with READY, as workers of Unstuck do."""
    announced_draining: bool = False
    """It announced that it drains."""
    found_nothing: bool = False
    """The last claim got nothing. It claims again when there may be new jobs."""
    held_address: bytes | None = None
    """Address of the job that it came back with, until the ledger confirms the job or its reply comes."""
    early_messages: list[Message] = field(default_factory=list)
    """Messages about that job that came before the ledger answered."""

    @property
    def is_free(self) -> bool:
        """Return whether a job should be claimed for it that it can start at once."""
        return (
            self.is_registered
            and self.assignment is None
            and self.held_address is None
            and not (self.is_claiming or self.is_draining or self.found_nothing)
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
        """Give a worker the id and the key that it has in the ledger."""
        self.remove(worker)
        worker.worker_id, worker.key = worker_id, key
        self.add(worker)

    def move(self, worker: ConnectedWorker, identity: bytes, connection: int | None) -> None:
        """Note that a worker came back through another connection."""
        self.remove(worker)
        worker.identity, worker.connection = identity, connection
        self.add(worker)

    def serves(self, service: str) -> bool:
        return any(not worker.is_draining for worker in self._by_service.get(service, {}).values())

    def held_by(self, worker_id: str) -> frozenset[tuple[int, int]]:
        """Return the attempts that a worker holds: (job_id, token)."""
        worker = self._by_id.get(worker_id)
        if worker is None or worker.assignment is None:
            return frozenset()
        return frozenset((job.job_id, job.token) for job in (worker.assignment.job, *worker.prefetched))

    def wake(self, queues: frozenset[str] | None, queue_of: Callable[[str], str]) -> None:
        """Let idle workers of these queues claim again; None: of all queues."""
        for worker in self:
            if worker.found_nothing and (queues is None or any(queue_of(one) in queues for one in worker.services)):
                worker.found_nothing = False

    def wake_one(self, service: str) -> None:
        """Let one idle worker of a service claim again, since there is a new job."""
        for worker in self._by_service.get(service, {}).values():
            if worker.found_nothing:
                worker.found_nothing = False
                return


def progress_of(worker_id: str, assignment: Assignment, about: dict[str, Any], at: float) -> list[tuple[str, Progress]]:
    """Return the progress that a worker reports, or nothing if the report has none."""
    done, total, message = about.get("done"), about.get("total"), about.get("message", "")
    if _number(done) is None and not (isinstance(message, str) and message):
        return []
    note = Progress(
        assignment.job.job_id,
        assignment.job.token,
        at,
        _number(done),
        _number(total),
        storable_text(message, MAX_MESSAGE_CHARS) if isinstance(message, str) else "",
    )
    return [(worker_id, note)]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if plain else None
