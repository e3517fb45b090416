"""Turn the wheel: do the floor's turns against the ledger, one at a time, in a thread of its own."""

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from unstuck.domain.endings import Attempt, Ending, NotStorable, conclude
from unstuck.domain.policy import Policy
from unstuck.errors import DuplicateJob, LedgerBusy, LedgerError, LedgerUnavailable, RefusedValue, SchemaMismatch
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Success, Turn, TurnAnswer
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.worker.messages import ComparisonDone, SchemaOutdated, TurnDone, TurnUncertain
from unstuck.worker.watchdog import ProgressClock

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
MAX_NAMED = 5
"""How many jobs of one turn are named in the log that must wait for a lock."""
LOCKS_S = 1.5
"""How long one turn may look for what other sessions' locks do not concern; the rest is deferred untried."""

log = logger("unstuck.worker")


@dataclass(frozen=True)
class _Compare:
    pass


class LedgerThread:
    """The floor gives one turn or comparison at a time and gets its answer in the mailbox."""

    def __init__(self, ledger: Ledger, worker_id: str, mailbox: Mailbox) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._mailbox = mailbox
        self._work: queue.SimpleQueue[Turn | _Compare | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._pause_s = 0.0
        self._refused: dict[int, str] = {}
        self._deferred: list[Turn] = []
        self._reasons: dict[int, str] = {}
        self._blocked: set[int] = set()
        """Tokens that were deferred: the ledger is asked about them before they are tried again."""
        self._tried_alone: dict[int, int] = {}
        """How often each of them was tried by itself: those that were not yet come first."""
        self._until_s = 0.0
        self._stalled = False
        self.movement = ProgressClock()
        self._thread = mailbox.thread("ledger", self._run)

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
            self.movement.moved("ledger_thread.turn")
            self.movement.busy = True
            self._mailbox.post(self._compare() if isinstance(work, _Compare) else self._turn(work))
            self.movement.busy = False

    def _turn(self, turn: Turn) -> TurnDone | TurnUncertain:
        began_s = time.monotonic()
        self._refused = {}
        self._deferred = []
        self._reasons = {}
        self._until_s = began_s + LOCKS_S
        try:
            answer = self._split_if_refused(turn) if not self._blocked else self._past_blocked(turn)
        except SchemaMismatch as error:
            self._mailbox.post(SchemaOutdated(error))
            return self._failed(turn, error)
        except LedgerUnavailable as error:
            return self._failed(turn, error)
        except LedgerError as error:
            if not self._pause_s:
                log.error("The ledger refused a turn", error=str(error))
            return self._failed(turn, error)
        self._pause_s = 0.0
        duration_s = time.monotonic() - began_s
        if not self._deferred:
            self._stalled = False
            self._forget_blocked(_jobs_of(turn))
            return TurnDone(turn, answer, duration_s, self._refused)
        deferred = _together(turn.worker_id, self._deferred)
        left = set(_jobs_of(deferred))
        self._forget_blocked(set(_jobs_of(turn)) - left)
        self._blocked |= left
        written = _without(turn, deferred, left)
        return TurnDone(written, answer, duration_s, self._refused, deferred, self._reasons)

    def _forget_blocked(self, tokens: Iterable[int]) -> None:
        if self._blocked:
            for token in tokens:
                self._blocked.discard(token)
                self._tried_alone.pop(token, None)

    def _failed(self, turn: Turn, error: LedgerError) -> TurnUncertain:
        """Say so, at once the first time. Who can read and not write (a full disk, a standby) would spin otherwise."""
        again = self._pause_s > 0
        self._stopping.wait(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, self._pause_s * 2), LONGEST_PAUSE_S)
        return TurnUncertain(turn, str(error), again)

    def _split_if_refused(self, turn: Turn) -> TurnAnswer:
        self.movement.moved()
        try:
            return self._ledger.workers.turn(turn)
        except (RefusedValue, DuplicateJob) as error:
            return self._split(turn, str(error))
        except LedgerBusy as error:
            return self._around_locks(turn, str(error))

    def _past_blocked(self, turn: Turn) -> TurnAnswer:
        """Write what was never blocked first, then what was: nothing else waits for it once more."""
        suspects = self._blocked & set(_jobs_of(turn))
        again = _only(turn, suspects)
        answers = []
        rest = _without(turn, again, suspects)
        if not _is_empty(rest):
            answers.append(self._split_if_refused(rest))
        if suspects:
            answers.append(self._around_locks(again, "another session held a lock", known=True))
        return _merged(answers)

    def _around_locks(self, turn: Turn, reason: str, *, known: bool = False) -> TurnAnswer:
        """Write what other sessions' locks do not concern and defer the rest.

        `known`: it was deferred before, and has not been tried in this turn."""
        jobs = _jobs_of(turn)
        try:
            holders = self._ledger.workers.blocked_outcomes(jobs.values()) if jobs else {}
        except LedgerBusy as error:
            # Not even that can be asked: somebody holds the whole table.
            return self._defer(turn, str(error))
        stuck = {token for token, job_id in jobs.items() if job_id in holders}
        if stuck:
            blocked = _only(turn, stuck)
            self._defer(blocked, "", holders)
            turn = _without(turn, blocked, stuck)
        if _is_empty(turn):
            return _merged([])
        if stuck or known:
            return self._split_if_refused(turn)
        # No row is held: it is a unique key of what follows an outcome, or the lock is free again.
        tokens = list(jobs)
        if time.monotonic() >= self._until_s:
            # Also where one lock is for everything, as in a file of SQLite: to try the parts would only take longer.
            return self._defer(turn, reason)
        if len(tokens) > 1 and self._blocked.issuperset(tokens):
            return self._one_by_one(turn, tokens, reason)
        if len(tokens) > 1:
            half = len(tokens) // 2
            rest = Turn(turn.worker_id, claim_request=turn.claim_request)
            parts = [rest, _only(turn, set(tokens[:half])), _only(turn, set(tokens[half:]))]
            return _merged([self._split_if_refused(part) for part in parts if not _is_empty(part)])
        if tokens and turn.claim_request is not None:
            self._defer(_only(turn, set(tokens)), reason)
            return self._split_if_refused(Turn(turn.worker_id, claim_request=turn.claim_request))
        return self._defer(turn, reason)

    def _one_by_one(self, turn: Turn, tokens: list[int], reason: str) -> TurnAnswer:
        """Write what is not blocked of what was deferred together, as far as time allows.

        By halves it would be the same few again and again that take up the time."""
        answers = []
        tokens.sort(key=lambda token: self._tried_alone.get(token, 0))
        for place, token in enumerate(tokens):
            if time.monotonic() >= self._until_s:
                self._defer(_only(turn, set(tokens[place:])), reason)
                break
            self._tried_alone[token] = self._tried_alone.get(token, 0) + 1
            answers.append(self._split_if_refused(_only(turn, {token})))
        return _merged(answers)

    def _defer(self, turn: Turn, reason: str, holders: dict[int, str] | None = None) -> TurnAnswer:
        """Hand a part of the turn back to the floor, which sends it again later; say so once for each attempt."""
        self._deferred.append(turn)
        self._reasons.update({token: (holders or {}).get(job_id, reason) for token, job_id in _jobs_of(turn).items()})
        fresh = {token: job_id for token, job_id in _jobs_of(turn).items() if token not in self._blocked}
        self._blocked.update(fresh)
        for job_id in list(fresh.values())[:MAX_NAMED]:
            why = (holders or {}).get(job_id, reason)
            log.warning("What a job did cannot be written yet and is tried again", job_id=job_id, reason=why)
        if len(fresh) > MAX_NAMED:
            log.warning("What more jobs did cannot be written yet", jobs=len(fresh) - MAX_NAMED)
        if turn.claim_request is not None and not self._stalled:
            self._stalled = True
            log.warning("The ledger cannot be written just now; trying on", reason=reason)
        return _merged([])

    def _split(self, turn: Turn, reason: str) -> TurnAnswer:
        """Find the outcome that cannot be written by halves; it fails alone and never blocks the wheel."""
        tokens = list(dict.fromkeys(item.token for part in (turn.done, turn.endings, turn.entries) for item in part))
        if len(tokens) > 1 or (tokens and (turn.start or turn.release or turn.claim_request)):
            half = len(tokens) // 2
            halves = (tokens[:half], tokens[half:]) if half else (tokens,)
            parts = [msgspec.structs.replace(_only(turn, set(some)), start=(), release=()) for some in halves]
            answers = [self._split_if_refused(part) for part in parts]
            if turn.start or turn.release or turn.claim_request:
                rest = Turn(turn.worker_id, start=turn.start, release=turn.release, claim_request=turn.claim_request)
                answers.append(self._split_if_refused(rest))
            return _merged(answers)
        if turn.entries:
            return self._without_entries(turn, reason)
        if not tokens:
            raise LedgerError(f"The ledger refused a turn without outcomes: {reason}")
        item: Success | Ending = turn.done[0] if turn.done else turn.endings[0]
        log.error("An outcome cannot be stored; its job fails alone", job_id=item.job_id, reason=reason)
        attempt = Attempt(item.job_id, item.token, Policy(), 0, 0)
        ending = conclude(attempt, NotStorable(reason))
        return self._plainly(Turn(turn.worker_id, endings=(ending,)))

    def _plainly(self, turn: Turn) -> TurnAnswer:
        """Write a turn that cannot be split any more."""
        try:
            return self._ledger.workers.turn(turn)
        except LedgerBusy as error:
            return self._defer(turn, str(error))

    def _without_entries(self, turn: Turn, reason: str) -> TurnAnswer:
        """Write the entries of one attempt by themselves, and its outcome: one of the two is to blame."""
        try:
            answers = [self._ledger.workers.turn(Turn(turn.worker_id, entries=turn.entries))]
        except RefusedValue as error:
            log.error("An entry cannot be stored", job_id=turn.entries[0].job_id, reason=str(error))
            self._refused[turn.entries[0].token] = str(error)
            answers = []
        except LedgerBusy as error:
            return self._defer(turn, str(error))
        if turn.done or turn.endings:
            answers.append(self._split_if_refused(msgspec.structs.replace(turn, entries=())))
        return _merged(answers)

    def _compare(self) -> ComparisonDone:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            self.movement.moved("ledger_thread.compare")
            try:
                return ComparisonDone(self._ledger.workers.held(self._worker_id))
            except LedgerError as error:
                if pause_s == FIRST_PAUSE_S:
                    log.warning("Cannot compare with the ledger yet; trying on", error=str(error))
                    if isinstance(error, SchemaMismatch):
                        self._mailbox.post(SchemaOutdated(error))
            self._stopping.wait(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return ComparisonDone([])


def _jobs_of(turn: Turn) -> dict[int, int]:
    """Return the jobs that a turn concerns, by token."""
    parts = (turn.done, turn.endings, turn.entries, turn.start, turn.release)
    return {item.token: item.job_id for part in parts for item in part}


def _is_empty(turn: Turn) -> bool:
    return turn.claim_request is None and not _jobs_of(turn)


def _only(turn: Turn, tokens: set[int]) -> Turn:
    """Return the part of a turn that concerns these attempts."""
    return Turn(
        turn.worker_id,
        done=tuple(item for item in turn.done if item.token in tokens),
        endings=tuple(item for item in turn.endings if item.token in tokens),
        start=tuple(item for item in turn.start if item.token in tokens),
        release=tuple(item for item in turn.release if item.token in tokens),
        outputs=tuple(item for item in turn.outputs if item.token in tokens),
        entries=tuple(item for item in turn.entries if item.token in tokens),
        follow=tuple(item for item in turn.follow if item.token in tokens),
    )


def _without(turn: Turn, part: Turn, tokens: set[int]) -> Turn:
    """Return a turn without these attempts, and without the wish if that is in the part that was taken out."""
    rest = _only(turn, set(_jobs_of(turn)) - tokens)
    return msgspec.structs.replace(rest, claim_request=turn.claim_request if part.claim_request is None else None)


def _together(worker_id: str, parts: list[Turn]) -> Turn:
    return Turn(
        worker_id,
        done=tuple(item for part in parts for item in part.done),
        endings=tuple(item for part in parts for item in part.endings),
        start=tuple(item for part in parts for item in part.start),
        release=tuple(item for part in parts for item in part.release),
        outputs=tuple(item for part in parts for item in part.outputs),
        claim_request=next((part.claim_request for part in parts if part.claim_request is not None), None),
        entries=tuple(item for part in parts for item in part.entries),
        follow=tuple(item for part in parts for item in part.follow),
    )


def _merged(answers: list[TurnAnswer]) -> TurnAnswer:
    return TurnAnswer(
        alive=all(answer.alive for answer in answers),
        claimed=tuple(job for answer in answers for job in answer.claimed),
        superseded=frozenset(pair for answer in answers for pair in answer.superseded),
        next_due_in_s=next((a.next_due_in_s for a in answers if a.next_due_in_s is not None), None),
        more=any(answer.more for answer in answers),
    )
