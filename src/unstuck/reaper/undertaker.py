"""Bring proofs of death to the ledger in the background, and keep them until it takes them."""

import queue
import threading
import time

import msgspec

from unstuck import host, logs
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import LedgerUnavailable, UnstuckError
from unstuck.domain.liveness import Detector
from unstuck.domain.recovery import printable, storable
from unstuck.domain.states import WorkerState
from unstuck.reaper.settling import MAX_EVENT_CHARS
from unstuck.reaper.sweep import Reaper

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
LATELY_S = 120.0
"""Who died longer ago and had the same pid was somebody else."""

log = logs.logger("unstuck.reaper")


class Proof(msgspec.Struct, frozen=True):
    """A process of this host that somebody saw end."""

    pid: int
    started: str
    evidence: str
    detector: Detector
    death: Autopsy | None = None


class Word(msgspec.Struct, frozen=True):
    """An event to be written, of which no burial tells."""

    kind: str
    message: str
    about: str


class Undertaker:
    """A thread of its own, so that whoever saw the death need not wait for the database."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._proofs: queue.SimpleQueue[Proof | Word | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-undertaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def bury(self, pid: int, started: str, evidence: str, death: Autopsy | None = None) -> None:
        """Have every worker that lived in this process declared dead; `death` is what its parent knows of it."""
        self._proofs.put(Proof(pid, started, evidence, Detector.SUPERVISOR, death))

    def tell(self, kind: str, message: str, about: str) -> None:
        """Have an event written, in its turn."""
        self._proofs.put(Word(kind, printable(message, MAX_EVENT_CHARS), about))

    def stop(self, patience_s: float) -> None:
        """Finish what is waiting, within the patience; the watchmen of others find the rest."""
        self._proofs.put(None)
        self._thread.join(patience_s)
        self._hurry.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while (proof := self._proofs.get()) is not None:
            wait_s = RETRY_FIRST_S
            while not self._deliver(proof) and not self._hurry.wait(wait_s):
                wait_s = min(wait_s * 2, RETRY_MAX_S)

    def _add(self, proof: Proof, death: Autopsy) -> None:
        """Tell how a worker ended of whom a neighbour, who was faster, could only say that it is gone."""
        now_s = time.time()
        for worker in self._reaper.ledger.workers():
            verdict = worker.verdict
            if worker.pid != proof.pid or worker.host != host.hostname() or worker.state is not WorkerState.DEAD:
                continue
            lately = worker.stopped_at is not None and now_s - worker.stopped_at < LATELY_S
            if verdict is None or verdict.detector is not Detector.NEIGHBOUR or not lately:
                continue
            held = 0 if verdict.autopsy is None else verdict.autopsy.beside_count
            known = msgspec.structs.replace(
                storable(death), detector=verdict.detector, pid=worker.pid, host=worker.host, beside_count=held
            )
            evidence = printable(proof.evidence, MAX_EVENT_CHARS)
            self._reaper.ledger.amend(worker.id, msgspec.structs.replace(verdict, evidence=evidence, autopsy=known))

    def _deliver(self, proof: Proof | Word) -> bool:
        """Give True when there is nothing left to do about it."""
        try:
            if isinstance(proof, Word):
                self._reaper.ledger.note_event(proof.kind, proof.message, about=proof.about)
                return True
            for worker in self._reaper.ledger.watch(host.hostname()):
                same = worker.pid == proof.pid and worker.process_started == proof.started
                if same and self._reaper.witness.is_neighbour(worker):
                    self._reaper.bury(worker.id, proof.detector, proof.evidence, proof.death)
            if proof.death is not None:
                self._add(proof, proof.death)
        except LedgerUnavailable:
            return False
        except UnstuckError:
            log.exception("A death could not be written down; the watchman's rounds still can", what=str(proof))
        return True
