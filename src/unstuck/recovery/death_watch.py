"""See workers of this host die: by pidfds of three peers, or by a report from their parent process.

The kernel makes a pidfd readable in the instant its process ends, so a death next door is settled within
milliseconds and not after a heartbeat timeout. The ring is by worker id, so everybody is held by three others.
"""

import os
import queue
import select
import threading
import time

import msgspec

from unstuck import host, logs
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import storable, storable_text
from unstuck.domain.liveness import Detector, Process
from unstuck.domain.states import WorkerState
from unstuck.errors import LedgerUnavailable, UnstuckError
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.recovery.decide import MAX_EVENT_CHARS
from unstuck.recovery.reap import Reaper

FOLLOWERS = 3
# Workers of the same host name in other pid namespaces follow too, and cannot be held.
LOOKED_AT = 24
EVIDENCE = "its process no longer exists"
# A fleet that is born together rings once for each: who looked a moment ago looks at the next ones together.
LOOK_GAP_S = 0.05
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0

log = logs.logger("unstuck.recovery")


class PeerWatch:
    """One thread that waits on the pidfds of a worker's followers."""

    def __init__(self, reaper: Reaper, worker_id: str) -> None:
        self._reaper = reaper
        self._worker_id = worker_id
        self._interval_s = reaper.recovery.heartbeat_interval_s
        self._held: dict[str, int] = {}
        self._dead: set[str] = set()
        self._refresh_s = 0.0
        self._looked_s = 0.0
        self._gap_s = LOOK_GAP_S
        self._retry_s = RETRY_FIRST_S
        self._stopping = False
        self._poll = select.poll()
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="unstuck-peer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def refresh(self) -> None:
        """Look anew who follows: somebody was born or died."""
        self._refresh_s = min(self._refresh_s, self._looked_s + self._gap_s)
        self._wake()

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(timeout_s)

    def step(self) -> float:
        """Do what is to be done and give the time until there is something again: one lap, but for the waiting."""
        now_s = host.boottime_s()
        try:
            # The burials first: everybody who waits for these jobs waits for us.
            self._report_dead()
            if now_s >= self._refresh_s:
                self._refresh_s = now_s + self._interval_s
                self._gap_s = self._next_gap_s(now_s - self._looked_s)
                self._looked_s = now_s
                self._look_around()
                self._report_dead()
        except LedgerUnavailable:
            # The reaper loop logs it; here the proof is kept until it can be delivered.
            wait_s, self._retry_s = self._retry_s, min(self._retry_s * 2, RETRY_MAX_S)
            self._refresh_s = min(self._refresh_s, now_s + wait_s)
            return wait_s
        except (UnstuckError, OSError):
            log.exception("Could not watch the peers on this host; the sweeps of the reaper still do")
            self._dead.clear()
        self._retry_s = RETRY_FIRST_S
        return max(0.0, self._refresh_s - host.boottime_s())

    @property
    def holding(self) -> frozenset[str]:
        """The workers whose end would be seen at once."""
        return frozenset(self._held)

    # ------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                try:
                    os.write(self._waker_fd, b"!")
                except BlockingIOError:
                    # Full of wake-ups: it will wake.
                    pass

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait(self.step())
        finally:
            self._close()

    def _next_gap_s(self, quiet_s: float) -> float:
        """Look twice as seldom while the rings go on, so that a thousand births are not a million looks."""
        quiet = quiet_s > max(2 * self._gap_s, LOOK_GAP_S)
        return LOOK_GAP_S if quiet else min(self._gap_s * 2, self._interval_s)

    def _wait(self, timeout_s: float) -> None:
        owners = {fd: worker_id for worker_id, fd in self._held.items()}
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self._wake_fd:
                os.read(self._wake_fd, 4096)
            elif fd in owners:
                self._dead.add(owners[fd])
                self._let_go(owners[fd])

    def _look_around(self) -> None:
        following = self._reaper.ledger.recovery.peers_of(self._worker_id, host.hostname(), LOOKED_AT)
        near = [
            worker
            for worker in following
            if self._reaper.observer.on_this_host(worker) and "neighbours" in self._reaper.rules_for(worker).evidence
        ]
        chosen = {worker.id: worker for worker in near[:FOLLOWERS] if worker.id != self._worker_id}
        for worker_id in set(self._held) - set(chosen):
            self._let_go(worker_id)
        for worker in chosen.values():
            if worker.id not in self._held:
                self._hold(worker)

    def _hold(self, worker: WorkerWatch) -> None:
        fd = host.pidfd(worker.pid, worker.process_started)
        if fd is None:
            if host.process_state(worker.pid, worker.process_started) is Process.GONE:
                self._dead.add(worker.id)
            return
        self._held[worker.id] = fd
        self._poll.register(fd, select.POLLIN)

    def _let_go(self, worker_id: str) -> None:
        fd = self._held.pop(worker_id)
        # Unregistered before it is closed: the number may be another process's in the next moment.
        self._poll.unregister(fd)
        os.close(fd)

    def _report_dead(self) -> None:
        while self._dead:
            worker_id = next(iter(self._dead))
            self._reaper.report_death(worker_id, Detector.PEER, EVIDENCE)
            self._dead.discard(worker_id)
            # Its place in the ring is free: somebody else follows now.
            self._refresh_s = 0.0

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker_id in list(self._held):
                self._let_go(worker_id)
            os.close(self._wake_fd)
            os.close(self._waker_fd)


LATELY_S = 120.0
"""Who died longer ago and had the same pid was somebody else."""


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


class DeathReporter:
    """A thread of its own, so that whoever saw the death need not wait for the database."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._proofs: queue.SimpleQueue[Proof | Word | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-death-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report_death(self, pid: int, started: str, evidence: str, death: Autopsy | None = None) -> None:
        """Have every worker that lived in this process declared dead; `death` is what its parent knows of it."""
        self._proofs.put(Proof(pid, started, evidence, Detector.SUPERVISOR, death))

    def tell(self, kind: str, message: str, about: str) -> None:
        """Have an event written, in its turn."""
        self._proofs.put(Word(kind, storable_text(message, MAX_EVENT_CHARS), about))

    def stop(self, patience_s: float) -> None:
        """Finish what is waiting, within the patience; the reapers of others find the rest."""
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
        for worker in self._reaper.ledger.workers.list():
            verdict = worker.verdict
            if worker.pid != proof.pid or worker.host != host.hostname() or worker.state is not WorkerState.DEAD:
                continue
            lately = worker.stopped_at is not None and now_s - worker.stopped_at < LATELY_S
            if verdict is None or verdict.detector is not Detector.PEER or not lately:
                continue
            held = 0 if verdict.autopsy is None else verdict.autopsy.beside_count
            known = msgspec.structs.replace(
                storable(death), detector=verdict.detector, pid=worker.pid, host=worker.host, beside_count=held
            )
            evidence = storable_text(proof.evidence, MAX_EVENT_CHARS)
            self._reaper.ledger.recovery.amend_verdict(
                worker.id, msgspec.structs.replace(verdict, evidence=evidence, autopsy=known)
            )

    def _deliver(self, proof: Proof | Word) -> bool:
        """Give True when there is nothing left to do about it."""
        try:
            if isinstance(proof, Word):
                self._reaper.ledger.events.write(proof.kind, proof.message, about=proof.about)
                return True
            for worker in self._reaper.ledger.recovery.watch(host.hostname()):
                same = worker.pid == proof.pid and worker.process_started == proof.started
                if same and self._reaper.observer.on_this_host(worker):
                    self._reaper.report_death(worker.id, proof.detector, proof.evidence, proof.death)
            if proof.death is not None:
                self._add(proof, proof.death)
        except LedgerUnavailable:
            return False
        except UnstuckError:
            log.exception("A death could not be recorded; the next sweep of the reaper can", what=str(proof))
        return True
