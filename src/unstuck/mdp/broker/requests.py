"""Requests that were accepted and have no reply yet, and when to poll their jobs."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from unstuck.domain.frames import write_map
from unstuck.ledger.contract.workers import ReplyAddress

FIRST_POLL_S = 0.002
GROWTH = 1.5
LONGEST_POLL_S = 0.25
POLLS_PER_S = 4_000


@dataclass(eq=False)
class ClientRequest:
    """One request of a client. With several calls, the reply follows when the last one has ended."""

    client: bytes
    correlation: bytes | None
    service: str
    id: str
    answers: list[list[bytes] | None]
    notify: bool
    jobs: list[int] = field(default_factory=list)
    """Ids of jobs that have ended."""

    @property
    def complete(self) -> bool:
        return all(answer is not None for answer in self.answers)

    def body(self) -> list[bytes]:
        """Return the body of the reply: the frames of a single call, or one frame for each of several calls."""
        if len(self.answers) == 1:
            return self.answers[0] or [b""]
        return [_one_frame(answer or []) for answer in self.answers]


def _one_frame(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else write_map({"frames": frames})


@dataclass(eq=False)
class PendingJob:
    """A job that a client waits for."""

    job_id: int
    request: ClientRequest
    place: int
    own_id: str
    since_s: float
    poll_every_s: float = FIRST_POLL_S
    held_here: bool = False
    """A worker of this broker has it, so its end need not be polled."""
    held_elsewhere: bool = False
    """A worker of another interface had it at the last poll. It cannot expire, however long it takes."""
    attempt: int = 0
    notified: set[tuple[int, bytes]] = field(default_factory=set)
    """Attempts and commands that the client was notified of."""


class RequestTable:
    def __init__(self) -> None:
        self._jobs: dict[int, list[PendingJob]] = {}
        self._open: Counter[bytes] = Counter()
        self._of_client: dict[bytes, set[int]] = {}
        self._polls: list[tuple[float, int]] = []
        self._parts: dict[bytes, set[int]] = {}
        """By client: jobs that have ended, of requests whose other calls have not."""

    def __len__(self) -> int:
        return len(self._jobs)

    def open_of(self, client: bytes) -> int:
        return self._open[client]

    def begin(self, client: bytes, calls: int) -> None:
        """Count accepted calls of a client before they are stored."""
        self._open[client] += calls

    def add(self, pending: PendingJob) -> None:
        several = self._jobs.setdefault(pending.job_id, [])
        several.append(pending)
        self._of_client.setdefault(pending.request.client, set()).add(pending.job_id)
        if len(several) == 1:
            heapq.heappush(self._polls, (pending.since_s + pending.poll_every_s, pending.job_id))

    def of(self, job_id: int) -> list[PendingJob]:
        return self._jobs.get(job_id, [])

    def all(self) -> Iterable[PendingJob]:
        return (pending for several in self._jobs.values() for pending in several)

    def knows(self, client: bytes, job_id: int) -> bool:
        waits = any(pending.request.client == client for pending in self.of(job_id))
        return waits or job_id in self._parts.get(client, ())

    def keep_part(self, request: ClientRequest, job_id: int) -> None:
        """Note that this call of a request has ended, until `complete` or `forget`."""
        self._parts.setdefault(request.client, set()).add(job_id)

    def complete(self, request: ClientRequest) -> None:
        """Drop the notes of a request whose calls have all ended."""
        parts = self._parts.get(request.client)
        if parts is not None:
            parts.difference_update(request.jobs)
            if not parts:
                del self._parts[request.client]

    def take(self, job_id: int) -> list[PendingJob]:
        """Remove and return the entries of a job that has ended."""
        several = self._jobs.pop(job_id, [])
        for pending in several:
            self._forget_of(pending.request.client, job_id)
            self._count_down(pending.request.client)
        return several

    def forget_one(self, pending: PendingJob) -> None:
        """Remove one entry of a job. Others may stay."""
        left = [one for one in self.of(pending.job_id) if one is not pending]
        if left:
            self._jobs[pending.job_id] = left
        else:
            self._jobs.pop(pending.job_id, None)
        if not any(one.request.client == pending.request.client for one in left):
            self._forget_of(pending.request.client, pending.job_id)
        self._count_down(pending.request.client)

    def forget(self, client: bytes) -> None:
        """Remove the entries of a client that is gone. Its jobs still run."""
        self._parts.pop(client, None)
        for job_id in self._of_client.pop(client, ()):
            left = [pending for pending in self._jobs[job_id] if pending.request.client != client]
            for _ in range(len(self._jobs[job_id]) - len(left)):
                self._count_down(client)
            if left:
                self._jobs[job_id] = left
            else:
                del self._jobs[job_id]

    def drop(self, client: bytes, calls: int) -> None:
        for _ in range(calls):
            self._count_down(client)

    def due(self, now_s: float) -> list[int]:
        """Return the jobs to poll now, which no worker of this broker holds."""
        found = []
        # The more jobs wait, the less often each is polled.
        slowest_s = max(LONGEST_POLL_S, len(self._jobs) / POLLS_PER_S)
        while self._polls and self._polls[0][0] <= now_s:
            _, job_id = heapq.heappop(self._polls)
            if self._needs_no_poll(job_id):
                continue
            first = self._jobs[job_id][0]
            first.poll_every_s = min(first.poll_every_s * GROWTH, slowest_s)
            heapq.heappush(self._polls, (now_s + first.poll_every_s, job_id))
            found.append(job_id)
        return found

    def next_due_s(self) -> float | None:
        while self._polls and self._needs_no_poll(self._polls[0][1]):
            heapq.heappop(self._polls)
        return self._polls[0][0] if self._polls else None

    def _needs_no_poll(self, job_id: int) -> bool:
        several = self._jobs.get(job_id)
        return several is None or several[0].held_here

    def poll_soon(self, job_id: int, now_s: float, *, tried: bool = False) -> None:
        """Poll a job that left its worker here. `tried`: it was started, so the time until it expires starts again."""
        several = self.of(job_id)
        for pending in several:
            pending.held_here, pending.poll_every_s = False, FIRST_POLL_S
            if tried:
                pending.since_s = now_s
        if several:
            heapq.heappush(self._polls, (now_s + FIRST_POLL_S, job_id))

    def hold_here(self, job_id: int, attempt: int) -> None:
        """Note that a worker of this broker has a job."""
        for pending in self.of(job_id):
            pending.held_here, pending.attempt = True, attempt

    def _forget_of(self, client: bytes, job_id: int) -> None:
        jobs = self._of_client.get(client)
        if jobs is not None:
            jobs.discard(job_id)
            if not jobs:
                del self._of_client[client]

    def _count_down(self, client: bytes) -> None:
        self._open[client] -= 1
        if self._open[client] <= 0:
            del self._open[client]


def restored(reply_addresses: list[ReplyAddress], now_s: float) -> list[PendingJob]:
    """Return the entries that a client had before a restart, from its reply addresses."""
    requests: dict[str, ClientRequest] = {}
    found = []
    for reply_address in reply_addresses:
        request = requests.setdefault(
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
