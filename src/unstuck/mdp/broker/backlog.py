"""Hand what is to be written of workers, and what clients ask, to orders in portions, so that peers that come and go
without end, or ask without end, keep nobody waiting."""

from collections import deque
from itertools import islice
from typing import TypeVar

from unstuck.ledger.contract.workers import Progress
from unstuck.mdp.broker.batch import Batch, Late, MmiQuery, Registration, WorkerDeath, WorkerTurn
from unstuck.mdp.broker.handed_out import Abandoned

PORTION = 20
"""Births, deaths, departures, notes, late replies and questions in one order, of each: every one is a commit, a turn or
a query of its own."""
LEAST_PORTION = 2
PATIENCE_S = 0.1
"""How long an order may take before the next ones get smaller portions. A fresh worker waits for about four orders: the
one under way, its birth, its first job and its reply."""
MAX_WITHDRAWN = 1_000
MAX_LATE = 1_000
MAX_LATE_BYTES = 64 * 1024 * 1024
"""Replies to requests that this broker does not know to be under way, and how large they are together."""
MAX_QUESTIONS = 10_000
MAX_QUESTIONS_PER_CLIENT = 100
MAX_BODY_BYTES = 10_000
MAX_TAKEN = 1_000
"""Questions in one order. Equal ones are asked of the ledger once."""

T = TypeVar("T")


class Backlog:
    def __init__(self) -> None:
        self._portion = PORTION
        self._registrations: dict[str, Registration] = {}
        self._withdrawn: dict[str, Registration] = {}
        """By name or former id: workers that left before anything of them was written."""
        self._losses: deque[WorkerDeath] = deque()
        """Deaths that cost a job."""
        self._deaths: deque[WorkerDeath] = deque()
        self._retired: deque[str] = deque()
        self._notes: dict[tuple[str, int], Progress] = {}
        self._late: deque[tuple[str, Late]] = deque()
        self._late_bytes = 0
        self.abandoned: deque[Abandoned] = deque()
        self.questions = Questions()
        self._returned: dict[bytes, None] = {}
        """Clients that asked for notices: what is unanswered of theirs is looked for, each with a query of its own."""

    @property
    def empty(self) -> bool:
        return not (self.urgent or self._retired or self._withdrawn or self._notes or self._late or self.abandoned)

    @property
    def urgent(self) -> bool:
        """Return whether somebody waits for the next order."""
        return bool(self._registrations or self._losses or self._deaths or self.questions or self._returned)

    @property
    def withdrawn(self) -> int:
        return len(self._withdrawn)

    def add_registration(self, registration: Registration) -> None:
        self._registrations[registration.worker_id] = registration

    def unborn(self, worker_id: str, *, is_over: bool = True) -> bool:
        """Forget a worker that left before anything of it was written; return whether that was so.

        One that came back under its name, or with a job, may stand in the ledger already. `is_over`: then its end is
        written."""
        registration = self._registrations.pop(worker_id, None)
        if registration is None:
            return False
        if is_over and (registration.named or registration.holding is not None):
            if len(self._withdrawn) >= MAX_WITHDRAWN:
                # Its former self is given up when it was silent for too long.
                del self._withdrawn[next(iter(self._withdrawn))]
            self._withdrawn[registration.name if registration.holding is None else registration.holding.worker_id] = (
                registration
            )
        return True

    def report_death(self, death: WorkerDeath) -> None:
        (self._deaths if death.job_id is None else self._losses).append(death)

    def retire(self, worker_id: str) -> None:
        self._retired.append(worker_id)

    def note(self, worker_id: str, progress: Progress) -> None:
        """Of one attempt only the last word counts."""
        self._notes[worker_id, progress.token] = progress

    def hand_in_late(self, worker_id: str, late: Late) -> bool:
        """Return False for a reply too many. Each may name another worker, which is a turn of its own."""
        size_bytes = len(late.done.result)
        if self._late and (len(self._late) >= MAX_LATE or self._late_bytes + size_bytes > MAX_LATE_BYTES):
            return False
        self._late_bytes += size_bytes
        self._late.append((worker_id, late))
        return True

    def come_back(self, client: bytes) -> None:
        self._returned[client] = None

    def leave(self, client: bytes) -> None:
        """Forget what a client wanted to know that has gone."""
        self._returned.pop(client, None)
        self.questions.forget(client)

    def pace(self, took_s: float) -> None:
        """Note how long the last order took: whoever is new waits for the whole of the next one."""
        if took_s > PATIENCE_S:
            self._portion = max(LEAST_PORTION, self._portion // 2)
        else:
            self._portion = min(PORTION, self._portion + 2)

    def fill(self, batch: Batch) -> None:
        """Move the next portion into an order."""
        portion = self._portion
        # The oldest and the newest: when a thousand come at once, whoever comes behind them is not the last.
        oldest, newest = islice(self._registrations, portion // 2), islice(reversed(self._registrations), portion // 2)
        for worker_id in dict.fromkeys([*oldest, *newest]):
            batch.registrations.append(self._registrations.pop(worker_id))
        for key in list(self._withdrawn)[:portion]:
            batch.withdrawn.append(self._withdrawn.pop(key))
        # Whoever lost a job is waited for.
        batch.deaths += _first(self._losses, portion)
        batch.deaths += _first(self._deaths, portion - len(batch.deaths))
        batch.retired += _first(self._retired, portion)
        for worker_id, token in list(self._notes)[:portion]:
            batch.notes.append((worker_id, self._notes.pop((worker_id, token))))
        for worker_id, late in _first(self._late, portion):
            self._late_bytes -= len(late.done.result)
            batch.worker_turns.setdefault(worker_id, WorkerTurn()).late.append(late)
        if not self._late:
            # A reply of such a worker that has come is written before what it had is settled.
            batch.abandoned += _first(self.abandoned, portion)
        for client in list(islice(self._returned, portion)):
            del self._returned[client]
            batch.returned.append(client)
        batch.questions += self.questions.take(portion)


def _first(waiting: deque[T], count: int) -> list[T]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


class Questions:
    def __init__(self) -> None:
        self._of: dict[bytes, deque[MmiQuery]] = {}
        """By client; whoever is next is first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, question: MmiQuery) -> bool:
        """Return False for a question too many, or too large."""
        waiting = self._of.get(question.client, ())
        if self._count >= MAX_QUESTIONS or len(waiting) >= MAX_QUESTIONS_PER_CLIENT:
            return False
        if sum(map(len, question.body)) > MAX_BODY_BYTES:
            return False
        self._of.setdefault(question.client, deque()).append(question)
        self._count += 1
        return True

    def forget(self, client: bytes) -> None:
        """Drop what a client asked that has gone."""
        self._count -= len(self._of.pop(client, ()))

    def take(self, portion: int) -> list[MmiQuery]:
        """Return the next questions, of each client in turn: at most `portion` different ones."""
        taken: list[MmiQuery] = []
        different: set[tuple[str, tuple[bytes, ...]]] = set()
        while self._of and len(taken) < MAX_TAKEN:
            client = next(iter(self._of))
            question = self._of[client][0]
            different.add((question.name, question.body))
            if len(different) > portion:
                break
            waiting = self._of.pop(client)
            taken.append(waiting.popleft())
            if waiting:
                self._of[client] = waiting
        self._count -= len(taken)
        return taken
