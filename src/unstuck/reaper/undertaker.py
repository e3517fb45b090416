"""Bring proofs of death to the ledger in the background, and keep them until it takes them."""

import queue
import threading

import msgspec

from unstuck import host, logs
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import LedgerUnavailable, UnstuckError
from unstuck.domain.liveness import Detector
from unstuck.reaper.sweep import Reaper

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0

log = logs.logger("unstuck.reaper")


class Proof(msgspec.Struct, frozen=True):
    """A process of this host that somebody saw end."""

    pid: int
    started: str
    evidence: str
    detector: Detector
    death: Autopsy | None = None


class Undertaker:
    """A thread of its own, so that whoever saw the death need not wait for the database."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._proofs: queue.SimpleQueue[Proof | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-undertaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def bury(self, pid: int, started: str, evidence: str, death: Autopsy | None = None) -> None:
        """Have every worker that lived in this process declared dead; `death` is what its parent knows of it."""
        self._proofs.put(Proof(pid, started, evidence, Detector.SUPERVISOR, death))

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

    def _deliver(self, proof: Proof) -> bool:
        """Give True when there is nothing left to do about it."""
        try:
            for worker in self._reaper.ledger.watch(host.hostname()):
                same = worker.pid == proof.pid and worker.process_started == proof.started
                if same and self._reaper.witness.is_neighbour(worker):
                    self._reaper.bury(worker.id, proof.detector, proof.evidence, proof.death)
        except LedgerUnavailable:
            return False
        except UnstuckError:
            log.exception("A death could not be written down; the watchman's rounds still can", pid=proof.pid)
        return True
