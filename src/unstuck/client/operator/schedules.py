"""Pause, resume, run, create and remove schedules."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unstuck.client.enqueue import EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.client.operator.audit import AuditLog
from unstuck.client.schedules import DEFAULT_CATCH_UP, definition_of
from unstuck.client.views import View, schedule_view, workers_firing
from unstuck.config import Settings
from unstuck.domain.policy import decode_policy
from unstuck.domain.schedules import CatchUp
from unstuck.domain.text import did_you_mean
from unstuck.domain.units import Duration
from unstuck.errors import ConfigError, UnknownSchedule
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.schedules import ScheduleRecord, unpack_job

TOPIC = "schedules"
"""Wakes the schedulers, which look at once for what changed."""


class Schedules:
    """Act on schedules."""

    def __init__(self, ledger: Ledger, settings: Settings, audit: AuditLog) -> None:
        self._ledger = ledger
        self._settings = settings
        self._audit = audit

    def get(self, name: str) -> ScheduleRecord:
        """Return a schedule; raise UnknownSchedule if there is none of this name."""
        found = {record.name: record for record in self._ledger.schedules.list()}
        if name not in found:
            listed = f" Known: {', '.join(sorted(found)[:10])}." if found else " There are none yet."
            raise UnknownSchedule(f"There is no schedule {name!r}.{did_you_mean(name, found)}{listed}")
        return found[name]

    def views(self) -> list[View]:
        """Return every schedule as plain values, with the number of living workers that would fire it."""
        workers = self._ledger.workers.list(living_only=True)
        return [schedule_view(record, workers) for record in self._ledger.schedules.list()]

    def pause(self, name: str) -> bool:
        """Stop a schedule; jobs that it enqueued go on. Return False if it was paused already."""
        return self._set_paused(name, True)

    def resume(self, name: str) -> bool:
        """Continue a schedule with its next tick, without the ticks in between. Return False if it was not paused."""
        return self._set_paused(name, False)

    def run(self, name: str) -> int:
        """Enqueue the job of a schedule now, in addition to its ticks. Return the id of the job."""
        record = self.get(name)
        with self._audit.record("run", f"schedule {name}") as entry:
            by = f"{self._audit.by} (schedule {name}, run now)"
            job = msgspec.structs.replace(unpack_job(record.job), enqueued_by=by)
            job_id = self._ledger.jobs.enqueue([job])[0].job_id
            entry.outcome = f"job {job_id}"
        self._ledger.notify({f"queue:{job.queue}"})
        return job_id

    def create(
        self,
        name: str,
        task: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = DEFAULT_CATCH_UP,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        priority: int = 0,
        unique_key: str | None = None,
    ) -> ScheduleRecord:
        """Create a schedule that is not in the code of an app, or change one. Every worker fires it."""
        known = find_task(load_tasks(self._ledger), task)
        if queue is not None and queue != known.queue:
            check_queue(queue, {known.queue, *(one.name for one in self._ledger.queues.list())})
        options = EnqueueOptions.checked(None, {"queue": queue, "priority": priority, "unique_key": unique_key})
        job = build_job(
            task=task,
            queue=known.queue,
            policy=decode_policy(known.policy),
            options=options,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            limit_bytes=self._settings.max_payload_bytes,
            known_queues=None,
        )
        definition = definition_of(name, job, cron, every, tz, catch_up)
        there = next((record for record in self._ledger.schedules.list() if record.name == name), None)
        if there is not None and there.source == "app":
            raise ConfigError(
                f"Schedule {name!r} stands in the code of an app. Choose another name, or change it there."
            )
        with self._audit.record("schedule", f"{name}: {task}, {definition.timing}"):
            self._ledger.schedules.know([definition], "operator")
        self._ledger.notify({TOPIC})
        return self.get(name)

    def remove(self, name: str) -> int:
        """Remove a schedule; jobs that it enqueued stay. Return how many living workers have it in their code.

        A schedule in the code of an app comes back with the next worker that starts."""
        record = self.get(name)
        with self._audit.record("remove", f"schedule {name}"):
            self._ledger.schedules.remove(name, self._audit.by)
        if record.source == "operator":
            return 0
        return len(workers_firing(record, self._ledger.workers.list(living_only=True)))

    def _set_paused(self, name: str, paused: bool) -> bool:
        self.get(name)
        with self._audit.record("pause" if paused else "resume", f"schedule {name}") as entry:
            changed = self._ledger.schedules.pause(name, paused, self._audit.by)
            entry.outcome = "done" if changed else "it was so already"
        self._ledger.notify({TOPIC})
        return changed
