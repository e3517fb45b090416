"""Show schedules as plain values, the same at every door."""

from collections.abc import Sequence
from typing import Any

from unstuck.client.views import call_view, instant
from unstuck.domain.schedules import is_known_to
from unstuck.domain.states import LIVING, Door
from unstuck.store.records import ScheduleRecord, WorkerRecord, unpack_job

View = dict[str, Any]


def schedule_view(record: ScheduleRecord, workers: Sequence[WorkerRecord]) -> View:
    job = unpack_job(record.job)
    args, kwargs = call_view(job.payload, job.payload_type)
    return {
        "name": record.name,
        "task": record.task,
        "queue": record.queue,
        "priority": job.priority,
        "args": args,
        "kwargs": kwargs,
        "cron": record.timing.cron,
        "every_s": record.timing.every_s,
        "tz": record.timing.zone,
        "when": str(record.timing),
        "catch_up": record.catch_up,
        "source": record.source,
        "paused": record.paused,
        "paused_by": record.paused_by,
        "next_at": instant(record.next_at),
        "last_at": instant(record.last_at),
        "fired_at": instant(record.fired_at),
        "last_job_id": record.last_job_id,
        "changed_at": instant(record.changed_at),
        "workers": len(keepers(record, workers)),
    }


def keepers(record: ScheduleRecord, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Give the living workers that fire it: any of ours for what an operator made, else those with this very code."""
    ours = [worker for worker in workers if worker.state in LIVING and worker.door is Door.PYTHON]
    if record.source == "operator":
        return ours
    return [worker for worker in ours if is_known_to(worker.metadata, record.fingerprint)]
