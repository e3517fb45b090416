"""Take the exchange of an order apart, so that what a lock concerns can wait alone. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from unstuck.ledger.contract.workers import RemoteHeartbeat
from unstuck.mdp.broker.batch import Batch, NewRequest, WorkerTurn

Key = tuple[int, int]
"""An attempt: (job_id, token)."""
Owner = str | bytes
"""The worker or the client that a part is about."""


@dataclass
class Part:
    """What is written in one commit. The parts of an order are written in any order, and each at most once."""

    posts: list[NewRequest] = field(default_factory=list)
    hands: dict[str, WorkerTurn] = field(default_factory=dict)
    pulses: list[RemoteHeartbeat] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())

    @property
    def owners(self) -> list[Owner]:
        return [*dict.fromkeys(post.asked.client for post in self.posts), *self.hands]

    def attempts(self) -> dict[Key, str]:
        """Return the attempts whose rows are written, with their workers."""
        return {key: worker_id for worker_id, hand in self.hands.items() for key in hand_keys(hand)}

    def split(self) -> list["Part"]:
        """Return two smaller parts, or this one if it concerns one client or one piece of one worker alone.

        All posts of a client stay together, so that its requests keep their order."""
        if self.pulses and (self.posts or self.hands or self.answered):
            return [Part(pulses=self.pulses), Part(self.posts, self.hands, answered=self.answered)]
        if self.answered and (self.posts or self.hands):
            return [Part(answered=self.answered), Part(self.posts, self.hands)]
        owners = self.owners
        if len(owners) > 1:
            half = len(owners) // 2
            return [self.of(owners[:half]), self.of(owners[half:])]
        if self.hands and len(pieces := self.pieces()) > 1:
            half = len(pieces) // 2
            return [_joined(pieces[:half]), _joined(pieces[half:])]
        return [self]

    def of(self, owners: Collection[Owner]) -> "Part":
        return Part(
            [post for post in self.posts if post.asked.client in owners],
            {worker_id: hand for worker_id, hand in self.hands.items() if worker_id in owners},
        )

    def pieces(self) -> list["Part"]:
        """Return the smallest parts that can be written alone."""
        parts = [self.of([client]) for client in dict.fromkeys(post.asked.client for post in self.posts)]
        parts += [Part(answered=self.answered)] if self.answered else []
        parts += [Part(pulses=self.pulses)] if self.pulses else []
        for worker_id, hand in self.hands.items():
            parts += [Part(hands={worker_id: piece}) for piece in _hand_pieces(hand)]
        return parts

    def take(self, keys: Collection[Key]) -> "Part":
        """Take what is said of these attempts out of this part, and return it."""
        taken = Part()
        for worker_id, hand in list(self.hands.items()):
            if out := _taken(hand, keys):
                taken.hands[worker_id] = out
            if hand.empty:
                del self.hands[worker_id]
        return taken

    def name(self) -> Owner:
        """Return what this part is remembered by while it waits; of pieces, one each."""
        if self.posts:
            return self.posts[0].asked.client
        return " ".join(f"{worker_id} {sorted(hand_keys(hand))}" for worker_id, hand in self.hands.items())


def hand_keys(hand: WorkerTurn) -> Iterator[Key]:
    for done in hand.done:
        yield done.job_id, done.token
    for ending in hand.endings:
        yield ending.job_id, ending.token
    for job in hand.release:
        yield job.job_id, job.token


def outcome_keys(hand: WorkerTurn) -> Iterator[Key]:
    """Return the attempts that this hand ends."""
    yield from hand_keys(WorkerTurn(hand.done, hand.endings))


def merge(into: Batch, more: Batch) -> None:
    """Add what `more` asks to `into`, behind what stands there."""
    for worker_id, hand in more.hands.items():
        join_hand(into.hands.setdefault(worker_id, WorkerTurn()), hand)
    for name in ("births", "posts", "deaths", "withdrawn", "notes", "retired", "left_over", "answered", "abandoned"):
        getattr(into, name).extend(getattr(more, name))


def join_hand(into: WorkerTurn, more: WorkerTurn) -> None:
    into.done += more.done
    into.late += more.late
    into.endings += more.endings
    into.release += more.release
    into.wants, into.free = max(into.wants, more.wants), into.free or more.free


def _hand_pieces(hand: WorkerTurn) -> list[WorkerTurn]:
    pieces = [WorkerTurn(done=[one]) for one in hand.done]
    pieces += [WorkerTurn(endings=[one]) for one in hand.endings]
    pieces += [WorkerTurn(release=[one]) for one in hand.release]
    return [*pieces, WorkerTurn(wants=hand.wants, free=hand.free)] if hand.wants else pieces


def _taken(hand: WorkerTurn, keys: Collection[Key]) -> WorkerTurn | None:
    out = WorkerTurn(
        [one for one in hand.done if (one.job_id, one.token) in keys],
        [one for one in hand.endings if (one.job_id, one.token) in keys],
        [one for one in hand.release if (one.job_id, one.token) in keys],
    )
    if out.empty:
        return None
    hand.done = [one for one in hand.done if (one.job_id, one.token) not in keys]
    hand.endings = [one for one in hand.endings if (one.job_id, one.token) not in keys]
    hand.release = [one for one in hand.release if (one.job_id, one.token) not in keys]
    return out


def _joined(parts: list[Part]) -> Part:
    joined = Part()
    for part in parts:
        for worker_id, hand in part.hands.items():
            join_hand(joined.hands.setdefault(worker_id, WorkerTurn()), hand)
    return joined
