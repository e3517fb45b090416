"""Find schedules that do not tick: overdue, paused, unknown to every living worker, or of a task that nobody knows."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, info, problem, warning
from unstuck.client.schedule_views import keepers
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import Diagnosis
from unstuck.store.records import ScheduleRecord


def check_schedules(facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    known = {task for worker in facts.living for task in worker.tasks}
    for record in facts.schedules:
        if record.paused:
            yield info(
                Code.SCHEDULE_PAUSED,
                f"Schedule {record.name!r} is paused",
                f"{record.paused_by or 'Somebody'} stopped it; it enqueues nothing until it goes on.",
                f"`unstuck schedules resume {record.name}`, when it shall.",
                schedule=record.name,
            )
        elif facts.living and not keepers(record, facts.workers):
            yield _unknown(record)
        elif facts.living and record.task not in known:
            yield warning(
                Code.SCHEDULE_TASK_UNKNOWN,
                f"Schedule {record.name!r} enqueues {record.task!r}, and no living worker knows that task",
                "Its jobs would wait until a worker comes that does.",
                f"Start a worker whose app has the task, or `unstuck schedules remove {record.name}`.",
                schedule=record.name,
                task=record.task,
            )
        elif record.next_at is not None and diagnosis.now_at - record.next_at > limits.late_s:
            yield _overdue(facts, record, diagnosis.now_at - record.next_at)


def _unknown(record: ScheduleRecord) -> Finding:
    return problem(
        Code.SCHEDULE_UNKNOWN,
        f"No living worker knows schedule {record.name!r}",
        f"It stood in the code of a worker that is gone ({record.timing}), and those that live have it not, or "
        "otherwise. A schedule that was taken out of the code stops, and stays in the list until it is removed.",
        f"Start a worker with that code, or `unstuck schedules remove {record.name}`.",
        schedule=record.name,
    )


def _overdue(facts: Facts, record: ScheduleRecord, late_s: float) -> Finding:
    why = (
        "Workers that know it live, and none has fired it: their logs say why (`A schedule cannot be fired`)."
        if facts.living
        else "No worker lives, and the workers keep the clock."
    )
    return problem(
        Code.SCHEDULE_OVERDUE,
        f"Schedule {record.name!r} has been due for {brief(late_s)}",
        why,
        f"Start a worker; it makes up for what was missed by the rule catch_up={record.catch_up}.",
        schedule=record.name,
        late_s=round(late_s, 1),
    )
