"""Split a batch into steps and parts, so that what another session's lock concerns can wait alone."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unstuck.errors import LedgerBusy, RefusedValue
from unstuck.ledger.contract.workers import RemoteHeartbeat
from unstuck.mdp.broker.batch import Batch, NewRequest, WorkerTurn

Key = tuple[int, int]
"""An attempt: (job_id, token)."""
Owner = str | bytes
"""The worker or the client that a part concerns."""


def _as_it_is(error: LedgerBusy | RefusedValue) -> "Sequence[Step] | None":
    return None


class Step(NamedTuple):
    do: Callable[[], None]
    """May be repeated after an outage."""
    instead: "Callable[[LedgerBusy | RefusedValue], Sequence[Step] | None]" = _as_it_is
    """Return the steps to do in place of this one, after another session's lock or a value that cannot be stored. No
    steps: it was deferred or dropped. None: repeat it as it is."""


@dataclass
class Part:
    """What is written in one commit. The parts of a batch are written in any order, and each at most once."""

    posts: list[NewRequest] = field(default_factory=list)
    worker_turns: dict[str, WorkerTurn] = field(default_factory=dict)
    heartbeats: list[RemoteHeartbeat] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())

    @property
    def owners(self) -> list[Owner]:
        return [*dict.fromkeys(post.request.client for post in self.posts), *self.worker_turns]

    def attempts(self) -> dict[Key, str]:
        """Return the attempts whose rows are written, with their workers."""
        return {
            key: worker_id for worker_id, worker_turn in self.worker_turns.items() for key in turn_keys(worker_turn)
        }

    def split(self) -> list["Part"]:
        """Return two smaller parts, or this one if it concerns one client or one piece of one worker.

        All posts of a client stay together, so that its requests keep their order."""
        if self.heartbeats and (self.posts or self.worker_turns or self.answered):
            return [Part(heartbeats=self.heartbeats), Part(self.posts, self.worker_turns, answered=self.answered)]
        if self.answered and (self.posts or self.worker_turns):
            return [Part(answered=self.answered), Part(self.posts, self.worker_turns)]
        owners = self.owners
        if len(owners) > 1:
            half = len(owners) // 2
            return [self.of(owners[:half]), self.of(owners[half:])]
        if self.worker_turns and len(pieces := self.pieces()) > 1:
            half = len(pieces) // 2
            return [_joined(pieces[:half]), _joined(pieces[half:])]
        return [self]

    def of(self, owners: Collection[Owner]) -> "Part":
        return Part(
            [post for post in self.posts if post.request.client in owners],
            {worker_id: worker_turn for worker_id, worker_turn in self.worker_turns.items() if worker_id in owners},
        )

    def pieces(self) -> list["Part"]:
        """Return the smallest parts that can be written alone."""
        parts = [self.of([client]) for client in dict.fromkeys(post.request.client for post in self.posts)]
        parts += [Part(answered=self.answered)] if self.answered else []
        parts += [Part(heartbeats=self.heartbeats)] if self.heartbeats else []
        for worker_id, worker_turn in self.worker_turns.items():
            parts += [Part(worker_turns={worker_id: piece}) for piece in _turn_pieces(worker_turn)]
        return parts

    def take(self, keys: Collection[Key]) -> "Part":
        """Remove and return what concerns these attempts."""
        taken = Part()
        for worker_id, worker_turn in list(self.worker_turns.items()):
            if out := _taken(worker_turn, keys):
                taken.worker_turns[worker_id] = out
            if worker_turn.empty:
                del self.worker_turns[worker_id]
        return taken

    def name(self) -> Owner:
        """Return the key under which this part is remembered while it waits."""
        if self.posts:
            return self.posts[0].request.client
        return " ".join(
            f"{worker_id} {sorted(turn_keys(worker_turn))}" for worker_id, worker_turn in self.worker_turns.items()
        )


def turn_keys(worker_turn: WorkerTurn) -> Iterator[Key]:
    for done in worker_turn.done:
        yield done.job_id, done.token
    for ending in worker_turn.endings:
        yield ending.job_id, ending.token
    for job in worker_turn.release:
        yield job.job_id, job.token


def outcome_keys(worker_turn: WorkerTurn) -> Iterator[Key]:
    """Return the attempts that this turn ends."""
    yield from turn_keys(WorkerTurn(worker_turn.done, worker_turn.endings))


def merge(into: Batch, more: Batch) -> None:
    """Append `more` to `into`."""
    for worker_id, worker_turn in more.worker_turns.items():
        merge_turn(into.worker_turns.setdefault(worker_id, WorkerTurn()), worker_turn)
    for name in (
        "registrations",
        "posts",
        "deaths",
        "withdrawn",
        "progress_notes",
        "retired",
        "stale_registrations",
        "answered",
        "abandoned",
    ):
        getattr(into, name).extend(getattr(more, name))


def merge_turn(into: WorkerTurn, more: WorkerTurn) -> None:
    into.done += more.done
    into.late_replies += more.late_replies
    into.endings += more.endings
    into.release += more.release
    into.claim_count, into.is_idle = max(into.claim_count, more.claim_count), into.is_idle or more.is_idle


def _turn_pieces(worker_turn: WorkerTurn) -> list[WorkerTurn]:
    pieces = [WorkerTurn(done=[one]) for one in worker_turn.done]
    pieces += [WorkerTurn(endings=[one]) for one in worker_turn.endings]
    pieces += [WorkerTurn(release=[one]) for one in worker_turn.release]
    return (
        [*pieces, WorkerTurn(claim_count=worker_turn.claim_count, is_idle=worker_turn.is_idle)]
        if worker_turn.claim_count
        else pieces
    )


def _taken(worker_turn: WorkerTurn, keys: Collection[Key]) -> WorkerTurn | None:
    out = WorkerTurn(
        [one for one in worker_turn.done if (one.job_id, one.token) in keys],
        [one for one in worker_turn.endings if (one.job_id, one.token) in keys],
        [one for one in worker_turn.release if (one.job_id, one.token) in keys],
    )
    if out.empty:
        return None
    worker_turn.done = [one for one in worker_turn.done if (one.job_id, one.token) not in keys]
    worker_turn.endings = [one for one in worker_turn.endings if (one.job_id, one.token) not in keys]
    worker_turn.release = [one for one in worker_turn.release if (one.job_id, one.token) not in keys]
    return out


def _joined(parts: list[Part]) -> Part:
    joined = Part()
    for part in parts:
        for worker_id, worker_turn in part.worker_turns.items():
            merge_turn(joined.worker_turns.setdefault(worker_id, WorkerTurn()), worker_turn)
    return joined
