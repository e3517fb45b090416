"""Gather what ended since the last turn, until a turn hands it in."""

from collections import deque

from unstuck.domain.endings import Ending, Release
from unstuck.domain.journal import CHECKPOINT_SEQ
from unstuck.store.records import Done, Entry, FollowUp, Held, Output, Turn, Wish

MAX_ITEMS = 1_000
MAX_BYTES = 8 * 1024 * 1024


class Outbox:
    def __init__(self) -> None:
        self.done: deque[Done] = deque()
        self.endings: deque[Ending] = deque()
        self.releases: deque[Release] = deque()
        self.entries: deque[Entry] = deque()
        self.checkpoints: dict[int, Entry] = {}
        """By token, the newest of each."""
        self.follow: dict[int, list[FollowUp]] = {}
        """By token, what is enqueued with its success."""
        self.outputs: dict[int, Output] = {}
        self.returned: set[str] = set()
        """Queues that get jobs back with the next turn: others should look there."""

    def __len__(self) -> int:
        return len(self.done) + len(self.endings) + len(self.releases) + len(self.entries) + len(self.checkpoints)

    def tokens(self) -> set[int]:
        return {item.token for part in (self.done, self.endings, self.releases) for item in part}

    def give_back(self, job_id: int, token: int, queue: str) -> None:
        """Return a job whose user code never ran."""
        self.releases.append(Release(job_id, token))
        self.returned.add(queue)

    def put_output(self, output: Output) -> None:
        if output.stdout or output.stderr:
            self.outputs[output.token] = output

    def put_entry(self, entry: Entry) -> None:
        if entry.seq == CHECKPOINT_SEQ:
            self.checkpoints[entry.token] = entry
        else:
            self.entries.append(entry)

    def turn(self, worker_id: str, start: tuple[Held, ...], wish: Wish | None) -> Turn:
        """Take as much as fits one turn."""
        entries, size = self._take_entries()
        # What is left belongs before the end of its attempt: that waits for the next turn.
        unwritten = {entry.token for entry in (*self.entries, *self.checkpoints.values())}
        done_later: list[Done] = []
        endings_later: list[Ending] = []
        follow: list[FollowUp] = []
        done: list[Done] = []
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
        ended = (tuple(done), tuple(endings), start, releases, tuple(outputs), wish)
        return Turn(worker_id, *ended, tuple(entries), tuple(follow))

    def _take_entries(self) -> tuple[list[Entry], int]:
        entries: list[Entry] = []
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

    def put_back(self, turn: Turn, still_held: set[int]) -> None:
        """Take back what an uncertain turn did not write: a terminal write is repeated until it is known."""
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
