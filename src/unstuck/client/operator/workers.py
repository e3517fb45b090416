"""Find workers, ask them to leave, switch them and their hosts off and on."""

from unstuck.client.operator.audit import Verbs, worker_named
from unstuck.client.operator.jobs import MAX_REASON_CHARS
from unstuck.domain.states import LIVE_STATES
from unstuck.domain.text import did_you_mean
from unstuck.errors import UnknownWorker
from unstuck.ledger.contract.workers import WorkerRecord


class WorkerVerbs(Verbs):
    """A part of the operator's verbs."""

    def find_worker(self, text: str) -> WorkerRecord:
        """Find a worker by its id, its name or the beginning of its id; the living are preferred."""
        workers = self._ledger.workers()
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

    def ask_worker(self, text: str, what: str, by: str | None = None) -> WorkerRecord:
        """Ask a worker to 'drain' or to 'stop' and wake it, so that it hears at once."""
        worker = self.find_worker(text)
        by = by or self._by
        with self._audit.record(by, what, worker_named(worker)):
            if not self._ledger.request(worker.id, what, by):
                raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to ask.")
        self._ring({f"worker:{worker.id}"})
        return worker

    def disable_worker(self, text: str, reason: str, by: str | None = None) -> tuple[WorkerRecord, set[str]]:
        """Switch a worker off until it is enabled; gives it, and the queues that nobody serves without it."""
        worker = self.find_worker(text)
        if worker.state not in LIVE_STATES:
            raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to disable.")
        by = by or self._by
        with self._audit.record(by, "disable", worker_named(worker)):
            self._ledger.disable(worker.id, reason[:MAX_REASON_CHARS], by)
        self._ring({f"worker:{worker.id}"})
        return worker, self._unserved(set(worker.queues))

    def enable_worker(self, text: str, by: str | None = None) -> tuple[WorkerRecord, bool]:
        """Let a worker take jobs again; gives it as it is now, and whether it was switched off itself."""
        worker = self.find_worker(text)
        by = by or self._by
        with self._audit.record(by, "enable", worker_named(worker)) as note:
            changed = self._ledger.enable(worker.id, by)
            note.outcome = "done" if changed else "it was not disabled"
        self._ring({f"worker:{worker.id}"})
        return self.find_worker(worker.id), changed

    def disable_host(self, host: str, reason: str, by: str | None = None) -> tuple[list[WorkerRecord], set[str]]:
        """Switch off every worker of a host, those to come included; gives the living, and the queues left alone."""
        workers = self._ledger.workers()
        known = {worker.host for worker in workers}
        if host not in known:
            raise UnknownWorker(
                f"No worker is known on host {host!r}.{did_you_mean(host, known)} `unstuck workers` lists them."
            )
        by = by or self._by
        with self._audit.record(by, "disable", f"host {host}"):
            self._ledger.disable_host(host, reason[:MAX_REASON_CHARS], by)
        here = [worker for worker in workers if worker.host == host and worker.state in LIVE_STATES]
        self._ring({f"worker:{worker.id}" for worker in here})
        return here, self._unserved({queue for worker in here for queue in worker.queues})

    def enable_host(self, host: str, by: str | None = None) -> tuple[list[WorkerRecord], bool]:
        """Let a host's workers take jobs again; gives the living, and whether it was disabled."""
        by = by or self._by
        with self._audit.record(by, "enable", f"host {host}") as note:
            changed = self._ledger.enable_host(host, by)
            note.outcome = "done" if changed else "it was not disabled"
        here = [worker for worker in self._ledger.workers(living_only=True) if worker.host == host]
        self._ring({f"worker:{worker.id}" for worker in here})
        return here, changed

    def _unserved(self, queues: set[str]) -> set[str]:
        at_work = [worker for worker in self._ledger.workers(living_only=True) if not worker.disabled]
        return queues - {queue for worker in at_work for queue in worker.queues}
