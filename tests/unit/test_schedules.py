"""Schedules as apps write them: what is refused when the app is built, and what a definition is known by."""

from typing import Any

import pytest

from unstuck import App, ConfigError, Context
from unstuck.client.doctor.examining import examine
from unstuck.domain.payload import decode_call
from unstuck.domain.ticking import Timing
from unstuck.store.records import ScheduleRecord, unpack_job

from tests.unit.doctor_kit import NOW_AT, facts, found, told, with_, worker  # isort: skip


def an_app(**schedule: Any) -> App:
    app = App("sqlite:///none.db", queues=["slow"])

    @app.schedule(**schedule)
    @app.task(on_crash="retry")
    def clean(folder: str = "/tmp", ctx: Context | None = None) -> str:
        return folder

    assert clean("/x") == "/x", "a task stays a function"
    return app


def test_a_schedule_takes_the_name_queue_and_policy_of_its_task() -> None:
    [one] = an_app(every="30s", kwargs={"folder": "/a"}, queue="slow", priority=5).schedule_definitions.values()
    assert (one.name, one.task, one.queue, one.timing) == ("clean", "clean", "slow", Timing(every_s=30))
    job = unpack_job(one.job)
    assert (job.on_crash, job.priority, job.enqueued_by, decode_call(job.payload).kwargs) == (
        "retry",
        5,
        None,
        {"folder": "/a"},
    )


def test_the_same_definition_has_the_same_fingerprint_in_every_process() -> None:
    [one] = an_app(every="30s").schedule_definitions.values()
    [same] = an_app(every=30).schedule_definitions.values()
    [other] = an_app(every="30s", priority=1).schedule_definitions.values()
    assert one.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({}, "either a cron expression or every"),
        ({"every": "1s", "cron": "* * * * *"}, "not both"),
        ({"cron": "* * *"}, "five fields"),
        ({"cron": "* * * * *", "tz": "Berlin"}, "no time zone 'Berlin'"),
        ({"every": "soon"}, "a duration like"),
        ({"every": "1s", "catch_up": "none"}, "'skip', 'latest' or 'all'"),
        ({"every": "1s", "args": [1, 2, 3]}, "Give what the task needs"),
        ({"every": "1s", "kwargs": {"folder": object()}}, "cannot be written as JSON"),
        ({"every": "1s", "delay": "5s"}, "delay has no place here"),
        ({"every": "1s", "prioritty": 5}, "Did you mean 'priority'"),
        ({"every": "1s", "name": "a b"}, "not a usable name"),
        ({"every": "1s", "unique_key": "k", "on_duplicate": "refuse"}, "nobody would hear of it"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_app_is_built(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        an_app(**schedule)


def test_an_unknown_queue_is_refused() -> None:
    from unstuck import UnknownQueue

    with pytest.raises(UnknownQueue, match="slwo"):
        an_app(every="1s", queue="slwo")


def test_two_schedules_need_two_names_and_a_task_of_this_app() -> None:
    app = an_app(every="1s")
    task = app.task_by_name("clean")
    with pytest.raises(ConfigError, match="two schedules named 'clean'"):
        app.schedule(task, every="2s")
    assert app.schedule(task, cron="* * * * *", name="other") is task
    with pytest.raises(ConfigError, match="another app"):
        App("sqlite:///none.db").schedule(task, every="2s")
    with pytest.raises(ConfigError, match=r"above @app\.task"):
        app.schedule("* * * * *")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="once"):
        app.schedule("* * * * *", cron="* * * * *")  # type: ignore[call-overload]


def record(**changes: Any) -> ScheduleRecord:
    [one] = an_app(every="1s").schedule_definitions.values()
    fields: dict[str, Any] = {
        "name": "nightly",
        "source": "app",
        "fingerprint": "f",
        "task": "add",
        "queue": "default",
        "timing": Timing(every_s=60.0),
        "catch_up": "latest",
        "job": one.job,
        "paused": False,
        "paused_by": None,
        "next_at": NOW_AT + 10,
        "last_at": None,
        "fired_at": None,
        "last_job_id": None,
        "version": 1,
    }
    return ScheduleRecord(**{**fields, "changed_at": NOW_AT, **changes})


KNOWS = worker(metadata={"containment": "cgroup v2", "schedules": ["f"]})


@pytest.mark.parametrize(
    ("schedule", "workers", "code"),
    [
        (record(), (KNOWS,), None),
        (record(), (worker(),), "schedule-unknown"),
        (record(source="operator"), (worker(),), None),
        (record(task="gone"), (KNOWS,), "schedule-task-unknown"),
        (record(next_at=NOW_AT - 100), (KNOWS,), "schedule-overdue"),
    ],
)
def test_the_doctor_finds_schedules_that_do_not_tick(
    schedule: ScheduleRecord, workers: tuple[Any, ...], code: str | None
) -> None:
    seen = found(with_(facts(*workers), schedules=(schedule,)))
    assert {name for name in seen if name.startswith("schedule-")} == ({code} if code else set())


def test_a_paused_schedule_is_good_to_know() -> None:
    paused = with_(facts(KNOWS), schedules=(record(paused=True, paused_by="ada"),))
    assert "schedule-paused" in told(paused)
    assert any("ada" in finding.why for finding in examine(paused))
