"""Gather what ended since the last turn, until a turn hands it in."""

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from unstuck.domain.endings import Ending, Release
from unstuck.domain.journal import CHECKPOINT_SEQ
from unstuck.ledger.contract.workers import (
    AttemptRef,
    ClaimRequest,
    DeferredOutcome,
    FollowUp,
    JournalEntry,
    Output,
    Success,
    Turn,
)

MAX_ITEMS = 1_000
MAX_BYTES = 8 * 1024 * 1024
FIRST_PAUSE_S = 0.1
NOTE_AFTER_S = 1.0
"""A wait for a lock that is shorter than this is not worth a note in the ledger."""
NOTE_AGAIN_S = 15.0
"""Well below the grace after which a job past its deadline is ended (`OVERDUE_GRACE_S`)."""
LONGEST_PAUSE_S = 1.0
"""Longest pause between two tries to write what other sessions' locks keep from the ledger."""


class Outbox:
    def __init__(self) -> None:
        self.done: deque[Success] = deque()
        self.endings: deque[Ending] = deque()
        self.releases: deque[Release] = deque()
        self.entries: deque[JournalEntry] = deque()
        self.checkpoints: dict[int, JournalEntry] = {}
        """By token, the newest of each."""
        self.follow: dict[int, list[FollowUp]] = {}
        """By token, what is enqueued with its success."""
        self.outputs: dict[int, Output] = {}
        self.returned: set[str] = set()
        """Queues that get jobs back with the next turn: others should look there."""
        self._blocked: list[tuple[float, Turn]] = []
        """What another session's lock kept from the ledger, and when it is tried again."""
        self._pauses: dict[int, float] = {}
        """By token, the last pause before a try."""
        self._late: dict[int, tuple[float, DeferredOutcome]] = {}
        """By token, ends and returns that were deferred and are not written yet, and since when."""
        self._noted: dict[int, float] = {}
        """By token, when `take_late` last returned it."""

    def __len__(self) -> int:
        return len(self.done) + len(self.endings) + len(self.releases) + len(self.entries) + len(self.checkpoints)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to write, not even later."""
        return not len(self) and not self._blocked

    def tokens(self) -> set[int]:
        """Return the attempts whose end, or return, is still to be written."""
        found = {item.token for part in (self.done, self.endings, self.releases) for item in part}
        for _, turn in self._blocked:
            found |= {item.token for part in (turn.done, turn.endings, turn.release) for item in part}
        return found

    def defer(self, turn: Turn, now_s: float, reasons: Mapping[int, str] = MappingProxyType({})) -> None:
        """Keep what could not be written because of a lock, and take it up again after a growing pause."""
        parts = (turn.done, turn.endings, turn.release, turn.entries)
        tokens = {item.token for part in parts for item in part}
        if not tokens:
            return
        pause_s = max(self._pauses.get(token, FIRST_PAUSE_S / 2) for token in tokens) * 2
        self._pauses.update(dict.fromkeys(tokens, min(pause_s, LONGEST_PAUSE_S)))
        self._blocked.append((now_s + min(pause_s, LONGEST_PAUSE_S), turn))
        for items, is_return in ((turn.done, False), (turn.endings, False), (turn.release, True)):
            for item in items:
                late = DeferredOutcome(item.job_id, item.token, reasons.get(item.token, ""), is_return)
                self._late.setdefault(item.token, (now_s, late))

    def take_late(self, now_s: float) -> list[DeferredOutcome]:
        """Return the ends and returns that have waited for a second and should be noted, each again after a while: a
        failover may have lost the note."""
        found = [
            one
            for since_s, one in self._late.values()
            if now_s - since_s >= NOTE_AFTER_S and now_s - self._noted.get(one.token, -NOTE_AGAIN_S) >= NOTE_AGAIN_S
        ]
        self._noted.update(dict.fromkeys((one.token for one in found), now_s))
        return found

    def waiting(self) -> list[DeferredOutcome]:
        """Return the ends and returns that other sessions' locks keep from the ledger."""
        return [one for _, one in self._late.values()]

    def deferred_turns(self) -> list[Turn]:
        """Return what is kept for later because of locks."""
        return [turn for _, turn in self._blocked]

    def take_up(self, now_s: float) -> None:
        """Put what was deferred long enough among the rest."""
        due = [turn for at_s, turn in self._blocked if at_s <= now_s]
        if due:
            self._blocked = [one for one in self._blocked if one[0] > now_s]
            for turn in due:
                self.put_back(turn, None)

    def next_s(self) -> float | None:
        """Return when something that was deferred is tried again."""
        return min((at_s for at_s, _ in self._blocked), default=None)

    def written(self, turn: Turn) -> None:
        """Forget the pauses of what is written now."""
        if self._pauses:
            for part in (turn.done, turn.endings, turn.release, turn.entries):
                for item in part:
                    self._pauses.pop(item.token, None)
            for part in (turn.done, turn.endings, turn.release):
                self._forget_late(item.token for item in part)

    def _forget_late(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._late.pop(token, None)
            self._noted.pop(token, None)

    def give_back(self, job_id: int, token: int, queue: str) -> None:
        """Return a job whose user code never ran."""
        self.releases.append(Release(job_id, token))
        self.returned.add(queue)

    def put_output(self, output: Output) -> None:
        if output.stdout or output.stderr:
            self.outputs[output.token] = output

    def put_entry(self, entry: JournalEntry) -> None:
        if entry.seq == CHECKPOINT_SEQ:
            self.checkpoints[entry.token] = entry
        else:
            self.entries.append(entry)

    def turn(self, worker_id: str, start: tuple[AttemptRef, ...], claim_request: ClaimRequest | None) -> Turn:
        """Take as much as fits one turn."""
        entries, size = self._take_entries()
        # What is left belongs before the end of its attempt: that waits for the next turn.
        unwritten = {entry.token for entry in (*self.entries, *self.checkpoints.values())}
        unwritten.update(entry.token for _, turn in self._blocked for entry in turn.entries)
        done_later: list[Success] = []
        endings_later: list[Ending] = []
        follow: list[FollowUp] = []
        done: list[Success] = []
        endings: list[Ending] = []
        outputs: list[Output] = []
        while self.done and len(done) < MAX_ITEMS and size < MAX_BYTES:
            item = self.done.popleft()
            if item.token in unwritten:
                done_later.append(item)
                continue
            done.append(item)
            if self.follow:
                follow += self.follow.pop(item.token, ())
            size += len(item.result) + self._take_output(item.token, outputs)
        while self.endings and len(done) + len(endings) < MAX_ITEMS and size < MAX_BYTES:
            ending = self.endings.popleft()
            if ending.token in unwritten:
                endings_later.append(ending)
                continue
            endings.append(ending)
            size += self._take_output(ending.token, outputs)
        self.done.extend(done_later)
        self.endings.extend(endings_later)
        releases = tuple(self.releases)
        self.releases.clear()
        ended = (tuple(done), tuple(endings), start, releases, tuple(outputs), claim_request)
        return Turn(worker_id, *ended, tuple(entries), tuple(follow))

    def _take_entries(self) -> tuple[list[JournalEntry], int]:
        entries: list[JournalEntry] = []
        size = 0
        while self.entries and len(entries) < MAX_ITEMS and size < MAX_BYTES:
            entries.append(self.entries.popleft())
            size += len(entries[-1].value)
        while self.checkpoints and len(entries) < MAX_ITEMS and size < MAX_BYTES:
            entries.append(self.checkpoints.pop(next(iter(self.checkpoints))))
            size += len(entries[-1].value)
        return entries, size

    def _take_output(self, token: int, outputs: list[Output]) -> int:
        if not self.outputs:
            return 0
        output = self.outputs.pop(token, None)
        if output is None:
            return 0
        outputs.append(output)
        return len(output.stdout) + len(output.stderr)

    def put_back(self, turn: Turn, still_held: set[int] | None) -> None:
        """Take back what a turn did not write: a terminal write is repeated until it is known. None: all of it."""
        if still_held is None:
            parts = (turn.done, turn.endings, turn.release, turn.entries)
            still_held = {item.token for part in parts for item in part}
        if self._late:
            for part in (turn.done, turn.endings, turn.release):
                self._forget_late(item.token for item in part if item.token not in still_held)
        self.done.extendleft(item for item in reversed(turn.done) if item.token in still_held)
        self.endings.extendleft(item for item in reversed(turn.endings) if item.token in still_held)
        self.releases.extendleft(item for item in reversed(turn.release) if item.token in still_held)
        for entry in reversed(turn.entries):
            if entry.token not in still_held:
                continue
            if entry.seq == CHECKPOINT_SEQ:
                self.checkpoints.setdefault(entry.token, entry)
            else:
                self.entries.appendleft(entry)
        for item in turn.follow:
            if item.token in still_held:
                self.follow.setdefault(item.token, []).append(item)
        self.outputs.update({item.token: item for item in turn.outputs if item.token in still_held})
