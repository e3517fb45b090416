"""Know the workers that said READY: by their identity, by their line, and by the id that they have in the ledger."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unstuck.domain.envelope import FRAMES
from unstuck.domain.policy import decode_policy
from unstuck.domain.recovery import Attempt
from unstuck.store.records import Claimed

MAX_DIGITS = 18
"""Of a number that every database takes."""
MAX_WORKER_ID_CHARS = 20
OTHER = "j"
"""Behind the number of a job that came through another door: its result must be JSON."""


@dataclass(eq=False)
class Doing:
    """What a worker works on."""

    job: Claimed
    address: bytes
    service: str

    def attempt(self) -> Attempt:
        return Attempt(
            self.job.job_id, self.job.token, decode_policy(self.job.policy), self.job.failures, self.job.crashes
        )


@dataclass(eq=False)
class Peer:
    identity: bytes
    worker_id: str
    name: str
    services: tuple[str, ...]
    line: int | None
    """Its connection, where that is known."""
    seen_s: float
    told_s: float
    """When we last said something to it."""
    host: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    born: bool = False
    doing: Doing | None = None
    settled: int = 0
    """Since its last beat in the ledger."""
    asking: bool = False
    """A job is being looked for on its behalf."""
    leaving: bool = False
    """It gets no more jobs."""
    empty_handed: bool = False
    """The last look found nothing; it is asked again when something may have come."""


class Peers:
    def __init__(self) -> None:
        self._by_identity: dict[bytes, Peer] = {}
        self._by_id: dict[str, Peer] = {}
        self._by_line: dict[int, set[bytes]] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def by_identity(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def by_id(self, worker_id: str) -> Peer | None:
        return self._by_id.get(worker_id)

    def on_line(self, line: int) -> list[Peer]:
        return [self._by_identity[identity] for identity in self._by_line.get(line, ())]

    def add(self, peer: Peer) -> None:
        self._by_identity[peer.identity] = peer
        self._by_id[peer.worker_id] = peer
        if peer.line is not None:
            self._by_line.setdefault(peer.line, set()).add(peer.identity)

    def remove(self, peer: Peer) -> None:
        self._by_id.pop(peer.worker_id, None)
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]
        if peer.line is not None and peer.line in self._by_line:
            self._by_line[peer.line].discard(peer.identity)
            if not self._by_line[peer.line]:
                del self._by_line[peer.line]

    def serves(self, service: str) -> bool:
        return any(service in peer.services and not peer.leaving for peer in self._by_id.values())


def address_of(job: Claimed, worker_id: str, service: str) -> bytes:
    """Give the token of the broker for a job in a worker's hands; workers echo it."""
    kind = "" if job.payload_type == FRAMES else OTHER
    return f"{job.job_id}{kind}.{job.token}.{worker_id}.{service}".encode("ascii")


def read_address(address: bytes) -> tuple[int, int, str, bool] | None:
    """Give job, token and worker of an address, and whether the job came in frames; None for what is none of ours."""
    parts = address.split(b".", 3)
    framed = not parts[0].endswith(OTHER.encode())
    parts[0] = parts[0].removesuffix(OTHER.encode())
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit() and parts[2].isalnum()):
        return None
    if max(map(len, parts[:2])) > MAX_DIGITS or len(parts[2]) > MAX_WORKER_ID_CHARS:
        return None
    return int(parts[0]), int(parts[1]), parts[2].decode("ascii"), framed
