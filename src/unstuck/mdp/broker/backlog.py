"""Registrations, deaths, late replies and queries that wait for a batch. Each batch takes a portion, so that a flood of
one kind delays nothing else."""

from collections import deque
from itertools import islice
from typing import TypeVar

from unstuck.ledger.contract.jobs import Progress
from unstuck.mdp.broker.batch import Batch, LateReply, MmiQuery, Registration, WorkerDeath, WorkerTurn
from unstuck.mdp.broker.handed_out import AbandonedWorker

PORTION = 20
"""Maximum number in one batch of registrations, deaths, departures, progress notes, late replies and queries, of each.
Every one is a commit, a turn or a query of its own."""
LEAST_PORTION = 2
PATIENCE_S = 0.1
"""How long a batch may take before the next ones get smaller portions. A new worker waits for about four batches: the
one in flight, its registration, its first job and its reply."""
MAX_WITHDRAWN = 1_000
MAX_LATE = 1_000
MAX_LATE_BYTES = 64 * 1024 * 1024
"""Limits of late replies: their number, and their size together."""
MAX_QUERIES = 10_000
MAX_QUERIES_PER_CLIENT = 100
MAX_BODY_BYTES = 10_000
MAX_TAKEN = 1_000
"""Maximum number of queries in one batch. The ledger answers equal ones once."""

T = TypeVar("T")


class Backlog:
    def __init__(self) -> None:
        self._portion = PORTION
        self._registrations: dict[str, Registration] = {}
        self._withdrawn: dict[str, Registration] = {}
        """By name or former id: workers that left before their registration was written."""
        self._deaths_with_job: deque[WorkerDeath] = deque()
        """Deaths of workers that had a job. Clients wait for them, so they go first."""
        self._deaths: deque[WorkerDeath] = deque()
        self._retired: deque[str] = deque()
        self._progress: dict[tuple[str, int], Progress] = {}
        self._late: deque[tuple[str, LateReply]] = deque()
        self._late_bytes = 0
        self.abandoned: deque[AbandonedWorker] = deque()
        self.queries = QueryQueue()
        self._resubscribed: dict[bytes, None] = {}
        """Clients whose unanswered requests are looked up, in the order in which they subscribed."""

    @property
    def empty(self) -> bool:
        return not (self.urgent or self._retired or self._withdrawn or self._progress or self._late or self.abandoned)

    @property
    def urgent(self) -> bool:
        """Return whether a peer waits for the next batch."""
        return bool(self._registrations or self._deaths_with_job or self._deaths or self.queries or self._resubscribed)

    @property
    def withdrawn(self) -> int:
        return len(self._withdrawn)

    def add_registration(self, registration: Registration) -> None:
        self._registrations[registration.worker_id] = registration

    def withdraw_registration(self, worker_id: str, *, is_over: bool = True) -> bool:
        """Drop the registration of a worker that left. Return False if it has been taken into a batch already.

        The ledger may have a worker from before that came back with its name or with a job. `is_over`: its end is
        written then."""
        registration = self._registrations.pop(worker_id, None)
        if registration is None:
            return False
        if is_over and (registration.named or registration.held_claim is not None):
            if len(self._withdrawn) >= MAX_WITHDRAWN:
                # The reaper declares it dead when its heartbeat is too old.
                del self._withdrawn[next(iter(self._withdrawn))]
            self._withdrawn[
                registration.name if registration.held_claim is None else registration.held_claim.worker_id
            ] = registration
        return True

    def report_death(self, death: WorkerDeath) -> None:
        (self._deaths if death.job_id is None else self._deaths_with_job).append(death)

    def retire(self, worker_id: str) -> None:
        self._retired.append(worker_id)

    def add_progress(self, worker_id: str, progress: Progress) -> None:
        """Keep the latest progress of an attempt."""
        self._progress[worker_id, progress.token] = progress

    def add_late_reply(self, worker_id: str, late: LateReply) -> bool:
        """Return False if there are too many. Each may name another worker, which is a turn of its own."""
        size_bytes = len(late.done.result)
        if self._late and (len(self._late) >= MAX_LATE or self._late_bytes + size_bytes > MAX_LATE_BYTES):
            return False
        self._late_bytes += size_bytes
        self._late.append((worker_id, late))
        return True

    def add_resubscribed(self, client: bytes) -> None:
        self._resubscribed[client] = None

    def forget_client(self, client: bytes) -> None:
        """Drop the lookups and queries of a client that is gone."""
        self._resubscribed.pop(client, None)
        self.queries.forget(client)

    def note_duration(self, took_s: float) -> None:
        """Adapt the portion to the duration of the last batch, since a new worker waits for the whole next one."""
        if took_s > PATIENCE_S:
            self._portion = max(LEAST_PORTION, self._portion // 2)
        else:
            self._portion = min(PORTION, self._portion + 2)

    def fill(self, batch: Batch) -> None:
        """Move the next portion into a batch."""
        portion = self._portion
        # The oldest and the newest: a worker that comes after a thousand others does not wait for all of them.
        oldest, newest = islice(self._registrations, portion // 2), islice(reversed(self._registrations), portion // 2)
        for worker_id in dict.fromkeys([*oldest, *newest]):
            batch.registrations.append(self._registrations.pop(worker_id))
        for key in list(self._withdrawn)[:portion]:
            batch.withdrawn.append(self._withdrawn.pop(key))
        # Clients wait for jobs of dead workers.
        batch.deaths += _first(self._deaths_with_job, portion)
        batch.deaths += _first(self._deaths, portion - len(batch.deaths))
        batch.retired += _first(self._retired, portion)
        for worker_id, token in list(self._progress)[:portion]:
            batch.progress_notes.append((worker_id, self._progress.pop((worker_id, token))))
        for worker_id, late in _first(self._late, portion):
            self._late_bytes -= len(late.done.result)
            batch.worker_turns.setdefault(worker_id, WorkerTurn()).late_replies.append(late)
        if not self._late:
            # A reply of an abandoned worker is written before its jobs are settled.
            batch.abandoned += _first(self.abandoned, portion)
        for client in list(islice(self._resubscribed, portion)):
            del self._resubscribed[client]
            batch.resubscribed.append(client)
        batch.queries += self.queries.take(portion)


def _first(waiting: deque[T], count: int) -> list[T]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


class QueryQueue:
    """`mmi.` queries for the ledger. Each client has its turn, and the number and size are limited."""

    def __init__(self) -> None:
        self._of: dict[bytes, deque[MmiQuery]] = {}
        """By client. The one whose turn is next comes first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, query: MmiQuery) -> bool:
        """Return False if there are too many, or if it is too large."""
        waiting = self._of.get(query.client, ())
        if self._count >= MAX_QUERIES or len(waiting) >= MAX_QUERIES_PER_CLIENT:
            return False
        if sum(map(len, query.body)) > MAX_BODY_BYTES:
            return False
        self._of.setdefault(query.client, deque()).append(query)
        self._count += 1
        return True

    def forget(self, client: bytes) -> None:
        """Drop the queries of a client that is gone."""
        self._count -= len(self._of.pop(client, ()))

    def take(self, portion: int) -> list[MmiQuery]:
        """Remove and return the next queries, one client after the other: at most `portion` different ones."""
        taken: list[MmiQuery] = []
        different: set[tuple[str, tuple[bytes, ...]]] = set()
        while self._of and len(taken) < MAX_TAKEN:
            client = next(iter(self._of))
            query = self._of[client][0]
            different.add((query.name, query.body))
            if len(different) > portion:
                break
            waiting = self._of.pop(client)
            taken.append(waiting.popleft())
            if waiting:
                self._of[client] = waiting
        self._count -= len(taken)
        return taken
