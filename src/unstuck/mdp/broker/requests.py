"""Remember who waits for what: requests that were taken and are not answered yet."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from unstuck.domain.frames import write_map
from unstuck.ledger.contract.workers import ReplyAddress

FIRST_LOOK_S = 0.002
GROWTH = 1.5
SLOWEST_LOOK_S = 0.25
LOOKS_PER_S = 4_000


@dataclass(eq=False)
class ClientRequest:
    """One request of a client; with several calls it is answered when the last has ended."""

    client: bytes
    correlation: bytes | None
    service: str
    id: str
    answers: list[list[bytes] | None]
    notify: bool
    jobs: list[int] = field(default_factory=list)
    """Those that have ended."""

    @property
    def complete(self) -> bool:
        return all(answer is not None for answer in self.answers)

    def body(self) -> list[bytes]:
        """Give the frames of the reply: those of the one call as they came, or one frame for each of several."""
        if len(self.answers) == 1:
            return self.answers[0] or [b""]
        return [_one_frame(answer or []) for answer in self.answers]


def _one_frame(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else write_map({"frames": frames})


@dataclass(eq=False)
class PendingJob:
    """Somebody waits for this job."""

    job_id: int
    asked: ClientRequest
    place: int
    own_id: str
    since_s: float
    step_s: float = FIRST_LOOK_S
    held_here: bool = False
    """One of our workers has it: we hear of its end by ourselves."""
    held_elsewhere: bool = False
    """A worker of another door had it when we last looked: it was taken, however long it takes."""
    attempt: int = 0
    told: set[tuple[int, bytes]] = field(default_factory=set)
    """Which attempts and kinds the client was told of."""


class RequestTable:
    def __init__(self) -> None:
        self._jobs: dict[int, list[PendingJob]] = {}
        self._open: Counter[bytes] = Counter()
        self._of_client: dict[bytes, set[int]] = {}
        self._looks: list[tuple[float, int]] = []
        self._parts: dict[bytes, set[int]] = {}
        """By client: jobs that have ended, of requests with several calls of which others have not."""

    def __len__(self) -> int:
        return len(self._jobs)

    def open_of(self, client: bytes) -> int:
        return self._open[client]

    def begin(self, client: bytes, calls: int) -> None:
        """Count what was taken of a client, before the ledger has it."""
        self._open[client] += calls

    def add(self, waiting: PendingJob) -> None:
        several = self._jobs.setdefault(waiting.job_id, [])
        several.append(waiting)
        self._of_client.setdefault(waiting.asked.client, set()).add(waiting.job_id)
        if len(several) == 1:
            heapq.heappush(self._looks, (waiting.since_s + waiting.step_s, waiting.job_id))

    def of(self, job_id: int) -> list[PendingJob]:
        return self._jobs.get(job_id, [])

    def all(self) -> Iterable[PendingJob]:
        return (waiting for several in self._jobs.values() for waiting in several)

    def knows(self, client: bytes, job_id: int) -> bool:
        waits = any(waiting.asked.client == client for waiting in self.of(job_id))
        return waits or job_id in self._parts.get(client, ())

    def keep_part(self, asked: ClientRequest, job_id: int) -> None:
        """Remember that this call of a request has ended, until `complete` or `forget`."""
        self._parts.setdefault(asked.client, set()).add(job_id)

    def complete(self, asked: ClientRequest) -> None:
        """All calls of this request have ended."""
        parts = self._parts.get(asked.client)
        if parts is not None:
            parts.difference_update(asked.jobs)
            if not parts:
                del self._parts[asked.client]

    def take(self, job_id: int) -> list[PendingJob]:
        """Give who waits for a job that has ended, and forget them."""
        several = self._jobs.pop(job_id, [])
        for waiting in several:
            self._forget_of(waiting.asked.client, job_id)
            self._less(waiting.asked.client)
        return several

    def forget_one(self, waiting: PendingJob) -> None:
        """This one waits no longer; others may."""
        left = [one for one in self.of(waiting.job_id) if one is not waiting]
        if left:
            self._jobs[waiting.job_id] = left
        else:
            self._jobs.pop(waiting.job_id, None)
        if not any(one.asked.client == waiting.asked.client for one in left):
            self._forget_of(waiting.asked.client, waiting.job_id)
        self._less(waiting.asked.client)

    def forget(self, client: bytes) -> None:
        """The client is gone: nobody waits for its jobs any more, though they will be done."""
        self._parts.pop(client, None)
        for job_id in self._of_client.pop(client, ()):
            left = [waiting for waiting in self._jobs[job_id] if waiting.asked.client != client]
            for _ in range(len(self._jobs[job_id]) - len(left)):
                self._less(client)
            if left:
                self._jobs[job_id] = left
            else:
                del self._jobs[job_id]

    def drop(self, client: bytes, calls: int) -> None:
        for _ in range(calls):
            self._less(client)

    def due(self, now_s: float) -> list[int]:
        """Give the jobs to look at now: those that somebody else works on, or nobody yet."""
        found = []
        # Many who wait are looked at less often: each look is a question to the ledger.
        slowest_s = max(SLOWEST_LOOK_S, len(self._jobs) / LOOKS_PER_S)
        while self._looks and self._looks[0][0] <= now_s:
            _, job_id = heapq.heappop(self._looks)
            if self._needs_no_look(job_id):
                continue
            first = self._jobs[job_id][0]
            first.step_s = min(first.step_s * GROWTH, slowest_s)
            heapq.heappush(self._looks, (now_s + first.step_s, job_id))
            found.append(job_id)
        return found

    def next_due_s(self) -> float | None:
        while self._looks and self._needs_no_look(self._looks[0][1]):
            heapq.heappop(self._looks)
        return self._looks[0][0] if self._looks else None

    def _needs_no_look(self, job_id: int) -> bool:
        several = self._jobs.get(job_id)
        return several is None or several[0].held_here

    def look_soon(self, job_id: int, now_s: float, *, tried: bool = False) -> None:
        """Somebody else has it from now on. `tried`: a worker had begun it, so its time to be taken begins anew."""
        several = self.of(job_id)
        for waiting in several:
            waiting.held_here, waiting.step_s = False, FIRST_LOOK_S
            if tried:
                waiting.since_s = now_s
        if several:
            heapq.heappush(self._looks, (now_s + FIRST_LOOK_S, job_id))

    def _forget_of(self, client: bytes, job_id: int) -> None:
        jobs = self._of_client.get(client)
        if jobs is not None:
            jobs.discard(job_id)
            if not jobs:
                del self._of_client[client]

    def _less(self, client: bytes) -> None:
        self._open[client] -= 1
        if self._open[client] <= 0:
            del self._open[client]


def restored(reply_addresses: list[ReplyAddress], now_s: float) -> list[PendingJob]:
    """Make of letters what was known before a restart."""
    asked: dict[str, ClientRequest] = {}
    found = []
    for reply_address in reply_addresses:
        request = asked.setdefault(
            reply_address.request_id,
            ClientRequest(
                reply_address.client,
                reply_address.correlation,
                reply_address.service,
                reply_address.request_id,
                [None] * reply_address.places,
                reply_address.notify,
            ),
        )
        found.append(
            PendingJob(
                reply_address.job_id,
                request,
                reply_address.place,
                reply_address.own_id or str(reply_address.job_id),
                now_s,
            )
        )
    return found
