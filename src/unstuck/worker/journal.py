"""Take down what running jobs write on their way, and tell them when it is durable."""

import selectors

from unstuck import host
from unstuck.domain.journal import CHECKPOINT_SEQ
from unstuck.ledger.contract.workers import JournalEntry, Turn
from unstuck.logs import logger
from unstuck.runner import messages
from unstuck.runner.messages import NewEntry
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.outbox import Outbox
from unstuck.worker.runner_process import JournalConnection
from unstuck.worker.slots import Slot

log = logger("unstuck.worker")


class JournalWriter:
    """Used in the floor's thread alone."""

    def __init__(self, selector: selectors.BaseSelector, outbox: Outbox) -> None:
        self._selector = selector
        self._outbox = outbox
        self._asked: dict[tuple[int, int], tuple[JournalConnection, int, HeldJob]] = {}
        """Who waits for an answer, by attempt and place."""

    def watch(self, slot: Slot) -> None:
        self._selector.register(
            slot.runner.journal_connection.socket, selectors.EVENT_READ, lambda events: self._ready(slot, events)
        )

    def take(self, slot: Slot) -> None:
        """Read the line: before anything else is believed of what the jobs of this runner did."""
        end = slot.runner.journal_connection
        for request in end.read():
            held_job = slot.jobs.get(request.token)
            if held_job is None:
                end.answer(request.number, messages.SUPERSEDED)
                continue
            entry = written(held_job, request.entry)
            self._outbox.put_entry(entry)
            if request.number != messages.NO_ANSWER:
                held_job.journal_pending += 1
                self._asked[entry.token, entry.seq] = (end, request.number, held_job)

    def after_turn(self, turn: Turn, superseded: frozenset[tuple[int, int]], refused: dict[int, str]) -> None:
        """Tell those who wait what became of their entries."""
        lost = {token for _, token in superseded}
        for entry in turn.entries:
            if entry.token in refused:
                self._answer(entry, messages.REFUSED, refused[entry.token])
            else:
                self._answer(entry, messages.SUPERSEDED if entry.token in lost else messages.WRITTEN)

    def put_back(self, turn: Turn, still_held: set[int]) -> None:
        """After a comparison: an uncertain turn is repeated, and what is not ours any more will never be written."""
        self._outbox.put_back(turn, still_held)
        for entry in turn.entries:
            if entry.token not in still_held:
                self._answer(entry, messages.SUPERSEDED)

    # ------------------------------------------------------------------------------------------

    def _answer(self, entry: JournalEntry, verdict: int, reason: str = "") -> None:
        if entry.seq == CHECKPOINT_SEQ:
            if verdict == messages.REFUSED:
                log.error("A checkpoint cannot be stored", job_id=entry.job_id, reason=reason)
            return
        waiting = self._asked.pop((entry.token, entry.seq), None)
        if waiting is None:
            return
        end, number, held_job = waiting
        held_job.journal_pending -= 1
        # To wait for the ledger is nothing to hold against it.
        held_job.last_heartbeat_s = max(held_job.last_heartbeat_s, host.boottime_s())
        end.answer(number, verdict, reason)
        if end.wants_write():
            self._watch_writing(end)

    def _ready(self, slot: Slot, events: int) -> None:
        end = slot.runner.journal_connection
        if events & selectors.EVENT_WRITE:
            end.flush()
            self._watch_writing(end)
        if events & selectors.EVENT_READ:
            self.take(slot)
            if end.closed:
                try:
                    self._selector.unregister(end.socket)
                except (KeyError, ValueError):
                    pass

    def _watch_writing(self, end: JournalConnection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.wants_write() else 0)
        try:
            key = self._selector.get_key(end.socket)
        except (KeyError, ValueError):
            return
        if key.events != wanted:
            self._selector.modify(end.socket, wanted, key.data)


def written(held_job: HeldJob, entry: NewEntry) -> JournalEntry:
    return JournalEntry(
        held_job.job.job_id, held_job.token, entry.seq, entry.kind, entry.name, entry.value, entry.signal
    )
