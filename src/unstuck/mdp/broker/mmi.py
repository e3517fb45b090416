"""Answers to `mmi.` queries that only the ledger can give: codes of 8/MMI, and CBOR for the rest."""

from typing import Any

from unstuck.client.doctor.health import quick_health
from unstuck.config import Settings
from unstuck.domain.frames import FRAMES, read_note, write_map
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs
from unstuck.mdp.broker.batch import MmiQuery

MAX_LISTED = 1_000
MAX_DIGITS = 18


class MmiAnswers:
    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings

    def answer(self, query: MmiQuery) -> list[bytes]:
        match query.name:
            case "mmi.service":
                return [self._service(query.body[0])]
            case "mmi.status":
                return self._status(query.body[0])
            case "mmi.list":
                return [protocol.OK, write_map({"services": self._services()})]
            case "mmi.workers":
                return [protocol.OK, write_map({"workers": self._workers()})]
            case "mmi.health":
                return [protocol.OK, write_map(self._health())]
            case _:
                return [protocol.NOT_IMPLEMENTED]

    def _service(self, name: bytes) -> bytes:
        if not protocol.is_service(name):
            return protocol.NOT_FOUND
        service = name.decode("ascii")
        known = {task.name: task.queue for task in self._ledger.queues.tasks()}
        pair = (known.get(service, service), service)
        return protocol.NOT_FOUND if self._ledger.queues.unserved([pair]) else protocol.OK

    def _status(self, query: bytes) -> list[bytes]:
        record = self._job(query)
        if record is None:
            return [protocol.NOT_FOUND]
        fields: dict[str, Any] = {
            "job_id": str(record.id),
            "ledger_id": record.id,
            "service": record.task,
            "state": record.state.value,
            "attempt": record.attempt,
            "crashes": record.crash_count,
            "final": record.state in FINAL_STATES,
        }
        if record.error is not None:
            fields |= {"error": str(record.error.code), "message": record.error.message, "cause": record.error.cause}
        body = []
        if record.state is JobState.SUCCEEDED and record.result is not None:
            body = jobs.body_of(record.result) if record.payload_type == FRAMES else [record.result]
        return [protocol.OK, write_map(fields), *body]

    def _job(self, query: bytes) -> JobRecord | None:
        job_id = (read_note(query) or {}).get("job_id", query)
        if isinstance(job_id, int):
            return self._ledger.jobs.get(job_id) if 0 <= job_id < 10**MAX_DIGITS else None
        if not isinstance(job_id, bytes | str):
            return None
        text = job_id.decode("ascii", "replace") if isinstance(job_id, bytes) else job_id
        if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
            return None
        return self._ledger.jobs.get(int(text))

    def _services(self) -> list[dict[str, Any]]:
        queues = {queue.name: queue for queue in self._ledger.queues.list()}
        found = []
        for task in self._ledger.queues.tasks()[:MAX_LISTED]:
            queue = queues.get(task.queue)
            found.append(
                {
                    "service": task.name,
                    "queue": task.queue,
                    "workers": 0 if queue is None else queue.workers,
                    "waiting": 0 if queue is None else queue.pending,
                }
            )
        return found

    def _workers(self) -> list[dict[str, Any]]:
        return [_worker(worker) for worker in self._ledger.workers.list(living_only=True)[:MAX_LISTED]]

    def _health(self) -> dict[str, Any]:
        found = quick_health(self._ledger, self._settings)
        return {
            "status": found.status,
            "workers": dict(found.fleet.workers),
            "troubles": [
                {
                    "code": one.code.value,
                    "severity": one.severity.value,
                    "message": f"{one.what}. {one.why}",
                    "cure": one.cure,
                }
                for one in found.troubles
            ],
        }


def _worker(worker: WorkerRecord) -> dict[str, Any]:
    return {
        "id": worker.id,
        "name": worker.name,
        "host": worker.host,
        "state": worker.state.value,
        "door": worker.transport.value,
        "services": list(worker.tasks),
        "running": worker.running,
        "processed": worker.processed,
        "silent_s": round(worker.silent_s, 1),
    }
