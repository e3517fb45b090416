"""Look at schedules, stop and start them, run one now, make and remove them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unstuck.client.enqueue import EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.client.operator.audit import Verbs
from unstuck.client.schedules import DEFAULT_CATCH_UP, definition_of
from unstuck.client.views import View, schedule_view
from unstuck.domain.policy import decode_policy
from unstuck.domain.schedules import CatchUp
from unstuck.domain.text import did_you_mean
from unstuck.domain.units import Duration
from unstuck.errors import ConfigError, UnknownSchedule
from unstuck.ledger.contract.schedules import ScheduleRecord, unpack_job

BELL = "schedules"
"""Rung where a schedule changed: whoever keeps the clock looks at once."""


class ScheduleVerbs(Verbs):
    """A part of the operator's verbs."""

    def schedules(self) -> list[ScheduleRecord]:
        return self._ledger.schedules()

    def schedule_views(self) -> list[View]:
        """Give every schedule as plain values, with how many living workers would fire it."""
        workers = self._ledger.workers(living_only=True)
        return [schedule_view(record, workers) for record in self._ledger.schedules()]

    def schedule(self, name: str) -> ScheduleRecord:
        found = {record.name: record for record in self._ledger.schedules()}
        if name not in found:
            listed = f" Known: {', '.join(sorted(found)[:10])}." if found else " There are none yet."
            raise UnknownSchedule(f"There is no schedule {name!r}.{did_you_mean(name, found)}{listed}")
        return found[name]

    def pause_schedule(self, name: str, by: str | None = None) -> bool:
        """Stop a schedule; what it enqueued runs. False where it was paused already."""
        return self._set_paused(name, True, by)

    def resume_schedule(self, name: str, by: str | None = None) -> bool:
        """Let a schedule go on with its next tick; those in between are left out."""
        return self._set_paused(name, False, by)

    def _set_paused(self, name: str, paused: bool, by: str | None) -> bool:
        self.schedule(name)
        by = by or self._by
        with self._audit.record(by, "pause" if paused else "resume", f"schedule {name}") as note:
            changed = self._ledger.pause_schedule(name, paused, by)
            note.outcome = "done" if changed else "it was so already"
        self._ring({BELL})
        return changed

    def run_schedule(self, name: str, by: str | None = None) -> int:
        """Enqueue its job now, beside its ticks; give the job's id."""
        record = self.schedule(name)
        by = by or self._by
        with self._audit.record(by, "run", f"schedule {name}") as note:
            who = f"{by} (schedule {name}, run now)"
            job = msgspec.structs.replace(unpack_job(record.job), enqueued_by=who)
            job_id = self._ledger.enqueue([job])[0].job_id
            note.outcome = f"job {job_id}"
        self._ring({f"queue:{job.queue}"})
        return job_id

    def remove_schedule(self, name: str, by: str | None = None) -> int:
        """Forget a schedule; what it enqueued stays. Gives how many living workers have it in their code: one that is
        there comes back with the next worker that starts."""
        record = self.schedule(name)
        by = by or self._by
        with self._audit.record(by, "remove", f"schedule {name}"):
            self._ledger.remove_schedule(name, by)
        if record.source == "operator":
            return 0
        return int(schedule_view(record, self._ledger.workers(living_only=True))["workers"])

    def create_schedule(
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
        by: str | None = None,
    ) -> ScheduleRecord:
        """Make a schedule that no code names, or change one that was made so. Every worker fires it."""
        known = find_task(load_tasks(self._ledger), task)
        if queue is not None and queue != known.queue:
            check_queue(queue, {known.queue, *(one.name for one in self._ledger.queues())})
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
        there = next((record for record in self._ledger.schedules() if record.name == name), None)
        if there is not None and there.source == "app":
            raise ConfigError(
                f"Schedule {name!r} stands in the code of an app. Choose another name, or change it there."
            )
        by = by or self._by
        with self._audit.record(by, "schedule", f"{name}: {task}, {definition.timing}"):
            self._ledger.know_schedules([definition], "operator")
        self._ring({BELL})
        return self.schedule(name)
