"""Limits, rates and lines as people write them: read once, refused with a cure; and the bucket, purely."""

from typing import Any

import pytest

from unstuck import App, ConfigError, DuplicateJob
from unstuck.client.enqueue import EnqueueOptions
from unstuck.client.reasons import JobContext, find_reason
from unstuck.client.workflows.description import NodeDescription, build
from unstuck.client.workflows.plan import plan
from unstuck.domain.conditions import Code
from unstuck.domain.limits import (
    UNLIMITED,
    KeyRule,
    QueueLimit,
    available,
    limit_in_words,
    read_limit,
    read_rate,
    refuse_unknown,
    write_rate,
)
from unstuck.domain.policy import encode_policy
from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import JobLinks, TaskRecord
from unstuck.ledger.contract.queues import KeyHolder, KeyRecord, QueueLimitRecord


@pytest.mark.parametrize(
    ("text", "rate", "window_s"), [("10/s", 10, 1), ("100/m", 100, 60), ("1/10s", 1, 10), (" 5 / h ", 5, 3600)]
)
def test_rates_are_read_as_people_write_them(text: str, rate: float, window_s: float) -> None:
    assert read_rate(text) == (rate, window_s)
    assert read_rate(write_rate(rate, window_s)) == (rate, window_s)


@pytest.mark.parametrize("text", ["", "100", "100/", "0/m", "-1/s", "10/y", "1e3/s", 10, None, "1/0s"])
def test_what_is_no_rate_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="rate"):
        read_rate(text)


@pytest.mark.parametrize("concurrency", [0, -1, True, "5", 2.0])
def test_what_is_no_concurrency_is_refused(concurrency: Any) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        read_limit(concurrency, None)


def test_the_bucket_fills_evenly_and_never_beyond_its_size() -> None:
    limit = QueueLimit(rate=10, window_s=60)
    assert available(limit, 0, None, 0).jobs == 10
    assert available(limit, 0, 0.0, 5.9).jobs == 0
    assert available(limit, 0, 0.0, 5.9).in_s == pytest.approx(0.1)
    assert available(limit, 0, 0.0, 6.0).jobs == 1
    assert available(limit, 0, 0.0, 1e9).jobs == 10
    assert available(limit, 0, 2.0, -100.0).jobs == 2, (
        "a clock that was set back neither fills the bucket nor empties it"
    )


def test_both_limits_count_and_a_full_house_is_not_a_matter_of_time() -> None:
    limit = QueueLimit(concurrency=3, rate=10, window_s=60)
    assert available(limit, 1, None, 0).jobs == 2
    full = available(limit, 3, 0.0, 0)
    assert (full.jobs, full.in_s) == (0, None)
    assert available(QueueLimit(), 100, None, 0).jobs == UNLIMITED
    assert limit_in_words(limit) == "3 at once, 10/m"


def app_with(**settings: Any) -> Any:
    app = App("sqlite:///nowhere.db")

    @app.task(**settings)
    def serve(customer: str, depth: int = 3) -> None: ...

    return serve


def line_of(task: Any, *args: Any, **kwargs: Any) -> Any:
    return task._job(args, kwargs, "").more


def test_the_key_is_made_of_the_arguments_however_they_come() -> None:
    task = app_with(concurrency_key="c:{customer}:{depth}", concurrency_limit=2)
    for more in (line_of(task, "x"), line_of(task, customer="x"), line_of(task, "x", depth=3)):
        assert (more.concurrency_key, more.concurrency_limit) == ("c:x:3", 2)
    computed = app_with(concurrency_key=lambda customer, **_: customer.upper())
    assert (line_of(computed, "x").concurrency_key, line_of(computed, "x").concurrency_limit) == ("X", 1)
    assert line_of(app_with().options(concurrency_key="k"), "x").concurrency_limit is None
    assert line_of(app_with(), "x") is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrency_key": "c:{custoner}"}, "custoner"),
        ({"concurrency_key": "c:{"}, "cannot be filled in"),
        ({"concurrency_key": ""}, "concurrency_key must be text"),
        ({"concurrency_limit": 2}, "no concurrency_key"),
        ({"concurrency_key": "k", "concurrency_limit": 0}, "concurrency_limit"),
        ({"expires": "0s"}, "expires must be above zero"),
        ({"keep": "soon"}, "keep must be"),
    ],
)
def test_a_task_that_could_not_line_up_is_refused_when_it_is_built(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app_with(**settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unique_key": "k", "unique": "sometimes"}, "unique must be"),
        ({"unique_key": "k", "on_duplicate": "explode"}, "on_duplicate must be"),
        ({"unique": "pending"}, "give it too"),
        ({"on_duplicate": "refuse"}, "give it too"),
        ({"concurrency_limit": 0, "concurrency_key": "k"}, "concurrency_limit"),
        ({"concurrency_key": "a\0b"}, "concurrency_key"),
        ({"expires": "0s"}, "expires"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnqueueOptions.checked(None, options)


@pytest.mark.parametrize(("key", "customer"), [("{customer:.2}", None), ("{customer[0]}", 7), ("{customer:>4}", [])])
def test_a_key_that_cannot_be_made_of_such_a_value_is_refused(key: str, customer: object) -> None:
    with pytest.raises(ConfigError, match="cannot be filled in"):
        line_of(app_with(concurrency_key=key), customer)


def test_what_follows_a_job_cannot_be_refused_where_nobody_hears_it() -> None:
    task = app_with().options(unique_key="k", on_duplicate="refuse")
    with pytest.raises(ConfigError, match="nobody would hear of it"):
        task.follow_up(("x", 1), {}, 7)


def test_a_refused_duplicate_names_the_first(tmp_path: Any) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def work() -> None: ...

    first = work.options(unique_key="k").enqueue()
    with pytest.raises(DuplicateJob, match=f"Job {first.id} has its unique key already") as caught:
        work.options(unique_key="k", on_duplicate="refuse").enqueue_many([(), ()])
    assert caught.value.job_id == first.id
    app.close()


# What is said of a job that waits -----------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path: Any) -> Any:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def work() -> None: ...

    record = work.enqueue().record()
    assert record.state is JobState.PENDING
    app.close()
    return record


def around(**facts: Any) -> JobContext:
    from unstuck.config import Recovery

    return JobContext(None, [], Recovery().rules, 0.0, **facts)


def test_a_blocked_job_says_who_has_its_place(waiting: Any) -> None:
    line = KeyRecord("customer:7", 1, None, 3, (KeyHolder(12, "running", "default"),))
    record = type(waiting)(**{**{name: getattr(waiting, name) for name in waiting.__struct_fields__}, "run_at": 0.0})
    reason = find_reason(
        record, around(links=JobLinks(concurrency_key="customer:7", blocked=True), concurrency_key=line)
    )
    assert reason is not None
    assert reason.code is Code.CONCURRENCY_KEY_FULL
    assert reason.sentence == "The limit of 1 for key 'customer:7' is held by job 12; 3 jobs wait for a place."


def test_a_queue_at_its_limit_says_so_and_a_rate_says_when(waiting: Any) -> None:
    from unstuck.client.reasons import _at_limit

    full = QueueLimitRecord("default", QueueLimit(concurrency=5), None, 5, 0, None)
    said = _at_limit(waiting, around(limit=full))
    assert said is not None
    assert said.why == "Queue 'default' is at its limit of 5: 5 jobs in hand"
    slow = QueueLimitRecord("default", QueueLimit(None, 100, 60), None, 5, 0, 3.0)
    said = _at_limit(waiting, around(limit=slow))
    assert said is not None
    assert (said.code, said.why) == (
        Code.RATE_LIMITED,
        "The rate limit of queue 'default' (100/m) lets the next one go in 3s",
    )


def planned(task: Any, given: str) -> Any:
    """Plan a workflow whose second node gets `given` from the first; give the line in which it will stand."""
    app = App("sqlite:///nowhere.db")
    first = app.task(name="first")(lambda: None)
    flow = app.workflow("bills")
    node = flow.add(first)
    flow.add(task, **{"customer": "x", "depth": 1, given: node})
    last = plan(flow, unique_key=None, priority=0).nodes[-1]
    assert last.job is not None
    return None if last.job.more is None else last.job.more.concurrency_key


@pytest.mark.parametrize("key", ["c:{customer}", "c:{customer.name}", "c:{0}", "c:{depth:{customer}}"])
def test_a_key_made_of_what_another_node_will_give_is_refused_when_the_workflow_is_planned(key: str) -> None:
    order = KeyRule(key=key, parameters=("customer", "depth"))
    with pytest.raises(ConfigError, match=r"gets from another.*options\(concurrency_key"):
        refuse_unknown(order, {"customer"} if "0" not in key else {0}, "serve")


def test_a_workflow_is_refused_only_where_the_key_needs_what_is_not_known_yet() -> None:
    task = app_with(concurrency_key="c:{customer}")
    with pytest.raises(ConfigError, match="made of 'customer'"):
        planned(task, "customer")
    assert planned(task, "depth") == "c:x"
    assert planned(app_with(concurrency_key="all"), "customer") == "all"
    assert planned(task.options(concurrency_key="k"), "customer") == "k"
    with pytest.raises(ConfigError, match="computed from its arguments"):
        planned(app_with(concurrency_key=lambda customer, **_: customer.upper()), "depth")


def test_the_items_of_a_map_are_not_known_either() -> None:
    app = App("sqlite:///nowhere.db")
    flow = app.workflow("bills")
    flow.map(app_with(concurrency_key="c:{customer}"), flow.add(app.task(name="first")(lambda: ["x"])))
    with pytest.raises(ConfigError, match="made of 'customer'"):
        plan(flow, unique_key=None, priority=0)


def test_a_workflow_that_comes_as_json_is_refused_too() -> None:
    task = app_with(concurrency_key="c:{customer}")
    known = {
        "first": TaskRecord("first", "default"),
        "serve": TaskRecord("serve", "default", encode_policy(task.definition.policy)),
    }
    nodes = [
        NodeDescription("first", "first"),
        NodeDescription("second", "serve", kwargs={"customer": {"$node": "first"}}),
    ]
    with pytest.raises(ConfigError, match="made of 'customer'"):
        build(task._runtime, known, "bills", nodes)
