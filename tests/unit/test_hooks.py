"""What follows the ends of jobs, as apps write it."""

from typing import Any

import pytest

from unstuck import App, ConfigError
from unstuck.client.enqueue import EnqueueOptions, build_job
from unstuck.domain.policy import decode_policy, encode_policy, fires
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.contract.schedules import unpack_job

URL = "sqlite:///none.db"


def names(job: NewJob) -> dict[str, list[str]]:
    hooks = (job.more.hooks if job.more is not None else None) or {}
    return {kind: [spec["task"] for spec in specs] for kind, specs in hooks.items()}


def test_a_task_is_followed_by_its_own_and_by_those_of_its_app() -> None:
    app = App(URL, after_crash="page")

    @app.task
    def tell(event: dict[str, Any]) -> None: ...

    @app.task(after_failure=[tell, "page"], after_success="tell")
    def work() -> None: ...

    @app.after_failure
    @app.task(queue="pages", on_crash="retry", timeout="5s")
    def page(event: dict[str, Any]) -> None: ...

    job = work.template((), {})
    assert names(job) == {"success": ["tell"], "failure": ["tell", "page"], "crash": ["page"]}
    assert job.more is not None
    assert job.more.hooks is not None
    [spec] = job.more.hooks["crash"]
    assert (spec["queue"], spec["on_crash"], spec["timeout_s"]) == ("pages", "retry", 5.0)
    assert decode_policy(job.policy).hooks is None, "it is stored once"
    assert names(page.template((), {"event": {}})) == {}, "what follows all is followed by nothing of the app's"
    assert names(work.options(priority=5).template((), {})) == names(job)


def test_a_schedule_enqueues_with_hooks_that_were_registered_later() -> None:
    app = App(URL)

    @app.schedule(every="1s")
    @app.task(after_success="tell")
    def work() -> None: ...

    @app.task
    def tell(event: dict[str, Any]) -> None: ...

    app.after_crash(tell)
    [one] = app.definition().schedules
    assert names(unpack_job(one.job)) == {"success": ["tell"], "crash": ["tell"]}


def test_doors_without_the_app_enqueue_with_hooks_too() -> None:
    app = App(URL)

    @app.task
    def tell(event: dict[str, Any]) -> None: ...

    @app.task(after_retry=tell)
    def work() -> None: ...

    # As the worker writes it into the ledger, and as a door reads it.
    policy = decode_policy(encode_policy(app.definition().tasks["work"].policy))
    job = build_job(
        task="work",
        queue="default",
        policy=policy,
        options=EnqueueOptions(),
        args=(),
        kwargs={},
        limit_bytes=1000,
        known_queues=None,
    )
    assert names(job) == {"retry": ["tell"]}


def test_a_follower_that_is_missing_is_refused_before_a_worker_starts() -> None:
    app = App(URL)

    @app.task(after_failure="tel")
    def work() -> None: ...

    @app.task
    def tell(event: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match=r"no such task\. Did you mean 'tell'"):
        app.definition()
    with pytest.raises(ConfigError, match="no such task"):
        work.template((), {})
    assert app.task_by_name("work") is work, "an app that is not finished can still be looked at"


def test_a_follower_must_take_the_event() -> None:
    app = App(URL)

    @app.task
    def tell(what: str) -> None: ...

    app.after_failure(tell)

    @app.task
    def work() -> None: ...

    with pytest.raises(ConfigError, match="must take one argument by name, `event`"):
        app.definition()


@pytest.mark.parametrize("wrong", [5, [None], print])
def test_what_is_no_task_is_refused(wrong: Any) -> None:
    app = App(URL)
    with pytest.raises(ConfigError, match="must be a task of this app or its name"):
        app.task(name="work", after_failure=wrong)(lambda: None)


def test_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 are the most"):
        App(URL, after_failure=[f"t{n}" for n in range(11)])


def test_what_was_drained_cancelled_or_suspended_is_followed_by_nothing() -> None:
    assert fires(AttemptState.DRAINED, JobState.PENDING) == []
    assert fires(AttemptState.CANCELLED, JobState.CANCELLED) == []
    assert fires(AttemptState.SUSPENDED, JobState.WAITING) == []
    assert fires(AttemptState.SUSPENDED, JobState.PENDING) == []
