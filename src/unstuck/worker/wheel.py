"""Turn the wheel: do the floor's turns against the ledger, one at a time, in a thread of its own."""

import queue
import threading
import time
from dataclasses import dataclass, field, replace

import msgspec

from unstuck.domain.endings import Ending
from unstuck.domain.errors import DuplicateJob, LedgerError, LedgerUnavailable, RefusedValue, SchemaMismatch
from unstuck.domain.outcomes import NotStorable
from unstuck.domain.policy import Policy
from unstuck.domain.recovery import Attempt, conclude
from unstuck.logs import logger
from unstuck.store.contract import Ledger
from unstuck.store.records import Done, HeldJob, Turn, TurnAnswer
from unstuck.worker.mailbox import Mailbox
from unstuck.worker.movement import Movement

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

log = logger("unstuck.worker")


@dataclass(frozen=True)
class TurnDone:
    turn: Turn
    answer: TurnAnswer
    duration_s: float
    refused: dict[int, str] = field(default_factory=dict)
    """Attempts whose entries cannot be stored, and why."""


@dataclass(frozen=True)
class TurnUncertain:
    """The answer never came: whether it was written must be found out by comparing."""

    turn: Turn
    error: str
    again: bool = False
    """The turn before it failed too: it was told already."""
    outdated: SchemaMismatch | None = None
    """The tables no longer have what this version uses."""


@dataclass(frozen=True)
class HeldAnswer:
    held: list[HeldJob]


@dataclass(frozen=True)
class _Compare:
    pass


class Wheel:
    """The floor gives one turn or comparison at a time and gets its answer in the mailbox."""

    def __init__(self, ledger: Ledger, worker_id: str, mailbox: Mailbox) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._mailbox = mailbox
        self._work: queue.SimpleQueue[Turn | _Compare | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._pause_s = 0.0
        self._refused: dict[int, str] = {}
        self.movement = Movement()
        self._thread = mailbox.thread("wheel", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._work.put(None)
        self._thread.join(timeout_s)

    def turn(self, turn: Turn) -> None:
        self._work.put(turn)

    def compare(self) -> None:
        """Ask the ledger for all that it believes we hold; waits out an outage."""
        self._work.put(_Compare())

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.movement.moved("wheel.turn")
            self.movement.busy = True
            self._mailbox.post(self._compare() if isinstance(work, _Compare) else self._turn(work))
            self.movement.busy = False

    def _turn(self, turn: Turn) -> TurnDone | TurnUncertain:
        began_s = time.monotonic()
        self._refused = {}
        try:
            answer = self._split_if_refused(turn)
        except SchemaMismatch as error:
            return replace(self._failed(turn, error), outdated=error)
        except LedgerUnavailable as error:
            return self._failed(turn, error)
        except LedgerError as error:
            if not self._pause_s:
                log.error("The ledger refused a turn", error=str(error))
            return self._failed(turn, error)
        self._pause_s = 0.0
        return TurnDone(turn, answer, time.monotonic() - began_s, self._refused)

    def _failed(self, turn: Turn, error: LedgerError) -> TurnUncertain:
        """Say so, at once the first time. Who can read and not write (a full disk, a standby) would spin otherwise."""
        again = self._pause_s > 0
        self._stopping.wait(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, self._pause_s * 2), LONGEST_PAUSE_S)
        return TurnUncertain(turn, str(error), again)

    def _split_if_refused(self, turn: Turn) -> TurnAnswer:
        self.movement.moved()
        try:
            return self._ledger.turn(turn)
        except (RefusedValue, DuplicateJob) as error:
            return self._split(turn, str(error))

    def _split(self, turn: Turn, reason: str) -> TurnAnswer:
        """Find the outcome that cannot be written by halves; it fails alone and never blocks the wheel."""
        tokens = list(dict.fromkeys(item.token for part in (turn.done, turn.endings, turn.entries) for item in part))
        if len(tokens) > 1 or (tokens and (turn.start or turn.release or turn.wish)):
            half = len(tokens) // 2
            parts = [_only(turn, tokens[:half]), _only(turn, tokens[half:])] if half else [_only(turn, tokens)]
            answers = [self._split_if_refused(part) for part in parts]
            if turn.start or turn.release or turn.wish:
                rest = Turn(turn.worker_id, start=turn.start, release=turn.release, wish=turn.wish)
                answers.append(self._split_if_refused(rest))
            return _merged(answers)
        if turn.entries:
            return self._without_entries(turn, reason)
        if not tokens:
            raise LedgerError(f"The ledger refused a turn without outcomes: {reason}")
        item: Done | Ending = turn.done[0] if turn.done else turn.endings[0]
        log.error("An outcome cannot be stored; its job fails alone", job_id=item.job_id, reason=reason)
        attempt = Attempt(item.job_id, item.token, Policy(), 0, 0)
        ending = conclude(attempt, NotStorable(reason))
        return self._ledger.turn(Turn(turn.worker_id, endings=(ending,)))

    def _without_entries(self, turn: Turn, reason: str) -> TurnAnswer:
        """Write the entries of one attempt by themselves, and its outcome: one of the two is to blame."""
        try:
            answers = [self._ledger.turn(Turn(turn.worker_id, entries=turn.entries))]
        except RefusedValue as error:
            log.error("An entry cannot be stored", job_id=turn.entries[0].job_id, reason=str(error))
            self._refused[turn.entries[0].token] = str(error)
            answers = []
        if turn.done or turn.endings:
            answers.append(self._split_if_refused(msgspec.structs.replace(turn, entries=())))
        return _merged(answers)

    def _compare(self) -> HeldAnswer:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            self.movement.moved()
            try:
                return HeldAnswer(self._ledger.held(self._worker_id))
            except LedgerError as error:
                if pause_s == FIRST_PAUSE_S:
                    log.warning("Cannot compare with the ledger yet; trying on", error=str(error))
            self._stopping.wait(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return HeldAnswer([])


def _only(turn: Turn, chosen: list[int]) -> Turn:
    tokens = set(chosen)
    return Turn(
        turn.worker_id,
        done=tuple(item for item in turn.done if item.token in tokens),
        endings=tuple(item for item in turn.endings if item.token in tokens),
        outputs=tuple(item for item in turn.outputs if item.token in tokens),
        entries=tuple(item for item in turn.entries if item.token in tokens),
        follow=tuple(item for item in turn.follow if item.token in tokens),
    )


def _merged(answers: list[TurnAnswer]) -> TurnAnswer:
    return TurnAnswer(
        alive=all(answer.alive for answer in answers),
        claimed=tuple(job for answer in answers for job in answer.claimed),
        superseded=frozenset(pair for answer in answers for pair in answer.superseded),
        next_due_in_s=next((a.next_due_in_s for a in answers if a.next_due_in_s is not None), None),
    )
