"""Find workers, drain and stop them, disable and enable them and their hosts."""

from typing import Literal

from unstuck.client.operator.audit import AuditLog, worker_named
from unstuck.domain.states import LIVE_STATES
from unstuck.domain.text import did_you_mean
from unstuck.errors import UnknownWorker
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord

MAX_REASON_CHARS = 500


class Workers:
    """Act on workers, which are named by their id, their name or the beginning of their id."""

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def find(self, text: str) -> WorkerRecord:
        """Return the worker with this id, name or beginning of its id; living workers are preferred."""
        workers = self._ledger.workers.list()
        for matches in (
            [worker for worker in workers if worker.id == text],
            [worker for worker in workers if worker.name == text],
            [worker for worker in workers if text and worker.id.startswith(text)],
        ):
            living = [worker for worker in matches if worker.state in LIVE_STATES]
            chosen = living or matches[:1]
            if len(chosen) == 1:
                return chosen[0]
            if chosen:
                ids = ", ".join(worker.id for worker in chosen[:5])
                raise UnknownWorker(f"{text!r} could be any of {len(chosen)} workers: {ids}. Give more of the id.")
        known = [name for worker in workers if worker.state in LIVE_STATES for name in (worker.name, worker.id)]
        raise UnknownWorker(f"There is no worker {text!r}.{did_you_mean(text, known)} `unstuck workers` lists them.")

    def drain(self, text: str) -> WorkerRecord:
        """Ask a worker to finish its running jobs and exit."""
        return self._ask(text, "drain")

    def stop(self, text: str) -> WorkerRecord:
        """Ask a worker to exit within its grace period."""
        return self._ask(text, "stop")

    def disable(self, text: str, reason: str) -> tuple[WorkerRecord, set[str]]:
        """Keep a worker from claiming jobs until it is enabled. Return it, and the queues that have no worker now."""
        worker = self.find(text)
        if worker.state not in LIVE_STATES:
            raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to disable.")
        with self._audit.record("disable", worker_named(worker)):
            self._ledger.workers.disable(worker.id, reason[:MAX_REASON_CHARS], self._audit.by)
        self._wake([worker])
        return worker, self._unserved(set(worker.queues))

    def enable(self, text: str) -> tuple[WorkerRecord, bool]:
        """Let a worker claim jobs again. Return it as it is now, and whether it was disabled itself."""
        worker = self.find(text)
        with self._audit.record("enable", worker_named(worker)) as entry:
            changed = self._ledger.workers.enable(worker.id, self._audit.by)
            entry.outcome = "done" if changed else "it was not disabled"
        self._wake([worker])
        return self.find(worker.id), changed

    def disable_host(self, host: str, reason: str) -> tuple[list[WorkerRecord], set[str]]:
        """Keep every worker of a host from claiming jobs, future workers included.

        Return its living workers, and the queues that have no worker now."""
        workers = self._ledger.workers.list()
        known = {worker.host for worker in workers}
        if host not in known:
            raise UnknownWorker(
                f"No worker is known on host {host!r}.{did_you_mean(host, known)} `unstuck workers` lists them."
            )
        with self._audit.record("disable", f"host {host}"):
            self._ledger.workers.disable_host(host, reason[:MAX_REASON_CHARS], self._audit.by)
        here = [worker for worker in workers if worker.host == host and worker.state in LIVE_STATES]
        self._wake(here)
        return here, self._unserved({queue for worker in here for queue in worker.queues})

    def enable_host(self, host: str) -> tuple[list[WorkerRecord], bool]:
        """Let the workers of a host claim jobs again. Return the living ones, and whether the host was disabled."""
        with self._audit.record("enable", f"host {host}") as entry:
            changed = self._ledger.workers.enable_host(host, self._audit.by)
            entry.outcome = "done" if changed else "it was not disabled"
        here = [worker for worker in self._ledger.workers.list(living_only=True) if worker.host == host]
        self._wake(here)
        return here, changed

    def void_attempt_tokens(self) -> int:
        """Declare every living worker dead and void its attempts, after a restore from a backup.

        Return the number of workers. See `void_tokens` of the ledger."""
        with self._audit.record("void_tokens", "every living worker") as entry:
            workers = self._ledger.void_tokens()
            entry.outcome = f"{workers} workers"
        return workers

    def _ask(self, text: str, request: Literal["drain", "stop"]) -> WorkerRecord:
        worker = self.find(text)
        with self._audit.record(request, worker_named(worker)):
            if not self._ledger.workers.request(worker.id, request, self._audit.by):
                raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to ask.")
        self._wake([worker])
        return worker

    def _wake(self, workers: list[WorkerRecord]) -> None:
        self._ledger.notify({f"worker:{worker.id}" for worker in workers})

    def _unserved(self, queues: set[str]) -> set[str]:
        at_work = [worker for worker in self._ledger.workers.list(living_only=True) if not worker.disabled]
        return queues - {queue for worker in at_work for queue in worker.queues}
