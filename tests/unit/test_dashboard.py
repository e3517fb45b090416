"""The pure parts of the page: charts, deaths told together, the health line, secrets, the timeline."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.dashboard import attempt, death_of_runner, job, snapshot, worker

from unstuck.client.doctor.findings import problem, warning
from unstuck.client.metrics import activity, quantile
from unstuck.domain.conditions import Code
from unstuck.domain.policy import Policy
from unstuck.domain.redaction import HIDDEN, Redactor
from unstuck.domain.states import WorkerState
from unstuck.http.dashboard.charts import TIMELINE_WIDTH, Series, bars, lines, timeline
from unstuck.http.dashboard.overview import recent_crashes, sum_up
from unstuck.http.dashboard.rendering import coarse, ticks
from unstuck.http.dashboard.snapshot import LONGEST_REST_S, SelfThrottled
from unstuck.ledger.contract.admin import MinuteCount
from unstuck.metrics.catalogue import DEATHS, JOB_RUN, JOBS_ENDED
from unstuck.metrics.counters import encode_labels

NOW = 1_800_000_000.0


def test_a_bar_is_as_high_as_its_share_and_gaps_are_empty() -> None:
    chart = bars([Series("good", [10, 0, 5]), Series("bad", [10, 0, 0])], ["a", "b", "c"], "jobs")
    assert chart.top == "20"
    heights = [float(height) for height in re.findall(r'class="c\d"[^>]*height="([\d.]+)"', str(chart.drawing))]
    assert heights == [60.0, 60.0, 30.0]
    assert chart.summary == "25 jobs in 3 minutes, at most 20 in one."


def test_a_line_breaks_where_nothing_was_measured() -> None:
    chart = lines([Series("wait", [0.1, None, 0.4, 0.5])], ["a", "b", "c", "d"], "Latency")
    assert str(chart.drawing).count("<path") == 2
    assert chart.top == "500ms"
    assert "wait 500ms lately" in chart.summary


def test_nothing_at_all_makes_an_empty_chart_and_no_error() -> None:
    assert bars([Series("good", [])], [], "jobs").empty
    assert lines([Series("wait", [None, None])], ["a", "b"], "Latency").empty


def test_a_name_in_a_chart_is_escaped() -> None:
    chart = bars([Series("<script>", [1])], ["<b>"], "<i>")
    assert "<script>" not in str(chart.drawing)
    assert "<b>" not in str(chart.drawing)
    assert "<i>" not in str(chart.drawing)


def test_jobs_lost_with_their_worker_are_told_with_it() -> None:
    dead = worker("w1", "ada", WorkerState.DEAD, died_at=NOW - 10)
    cause = "worker w1 on host h: its process no longer exists (neighbour)"
    events = [death_of_runner(1, NOW - 9, cause, "requeued"), death_of_runner(2, NOW - 9, cause, "failed")]
    (told,) = recent_crashes([dead], events, {}, NOW)
    assert (told.what, told.names[0].text) == ("worker", "ada")
    assert told.became == {"re-queued": 1, "failed": 1}


def test_a_thousand_deaths_of_one_moment_are_one_line() -> None:
    dead = [worker(f"w{number}", f"n{number}", WorkerState.DEAD, died_at=NOW - 5) for number in range(1000)]
    (told,) = recent_crashes(dead, [], {}, NOW)
    assert told.count == 1000


def test_a_task_that_dies_of_the_same_all_hour_is_one_trouble_and_another_cause_is_another() -> None:
    events = [death_of_runner(number, NOW - 3000 + number, "killed by SIGSEGV", "requeued") for number in range(5)]
    events.append(death_of_runner(9, NOW - 100, "killed by SIGKILL", "failed"))
    told = recent_crashes([], events, dict.fromkeys(range(10), "decode"), NOW)
    assert [(death.task, death.count) for death in told] == [("decode", 1), ("decode", 5)]


def test_what_only_failed_did_not_die() -> None:
    event = death_of_runner(1, NOW, "", "failed", message="TASK_FAILED: no")
    assert recent_crashes([], [event], {}, NOW) == []


def test_nothing_is_called_right_before_the_doctor_has_looked() -> None:
    seen = snapshot(NOW, [worker("w1", "ada", WorkerState.ACTIVE)])
    said = sum_up(dataclasses.replace(seen, findings=None), [])
    assert said.level == "unknown"
    assert "the doctor is still looking" in said.sentence


def test_the_health_line_says_the_worst_first() -> None:
    well = worker("w1", "ada", WorkerState.ACTIVE)
    assert sum_up(snapshot(NOW, [well]), []).level == "good"
    finding = warning(Code.WORKER_DISABLED, "one is disabled", "", "enable it")
    assert sum_up(snapshot(NOW, [well], [finding]), []).sentence == "One is disabled."
    dead = worker("w2", "grace", WorkerState.DEAD, died_at=NOW - 10)
    deaths = recent_crashes([dead], [], {}, NOW)
    said = sum_up(snapshot(NOW, [well, dead], [finding]), deaths)
    assert said.level == "warning"
    assert "worker grace: its process no longer exists" in said.sentence
    events = [death_of_runner(number, NOW - 10 - 600 * number, "killed", "failed") for number in range(3)]
    said = sum_up(snapshot(NOW, [well]), recent_crashes([], events, {}, NOW))
    assert said.sentence.startswith("1 runner died in the last five minutes")
    worst = problem(Code.NO_WORKER_FOR_QUEUE, "3 jobs wait", "", "start one")
    said = sum_up(snapshot(NOW, [well, dead], [worst, finding]), deaths)
    assert (said.level, said.sentence, said.more) == ("problem", "3 jobs wait.", 1)
    assert "grace" in said.also
    silent = worker("w3", "mary", WorkerState.SUSPECT)
    assert "mary" in sum_up(snapshot(NOW, [well, silent]), []).sentence


@pytest.mark.parametrize("name", ["password", "PASSWORD", "api_key", "apiKey", "stripe-api-key", "auth_token", "Pin"])
def test_secrets_are_hidden_wherever_they_lie(name: str) -> None:
    redact = Redactor(["pin"])
    assert redact({name: "x", "list": [{name: {"deep": 1}}]}) == {name: HIDDEN, "list": [{name: HIDDEN}]}


def test_what_is_no_secret_stays() -> None:
    value = {"customer": 1, "cents": [1, {"keyboard": "qwerty"}], "password": ""}
    assert Redactor([])(value) == value


@pytest.mark.parametrize(
    ("task", "args", "shown"),
    [
        (lambda user, password: None, ["ann", "x"], ["ann", HIDDEN]),
        (lambda pin_code, user: None, ["x", {"token": "x"}], [HIDDEN, {"token": HIDDEN}]),
        (lambda user, *tokens: None, ["ann", "x", "y"], ["ann", HIDDEN, HIDDEN]),
        (lambda user, /, *names, password: None, ["ann", "bob"], ["ann", "bob"]),
        (lambda password: None, [None], [None]),
    ],
)
def test_a_secret_is_hidden_by_the_name_of_the_parameter_that_takes_it(
    task: Callable[..., None], args: list[Any], shown: list[Any]
) -> None:
    redact = Redactor(["pin"])
    places, rest = redact.places(inspect.signature(task).parameters.values())
    policy = Policy(hidden_args=places, hidden_args_from=rest)
    assert redact.call(args, {"cents": 1, "password": "x"}, policy) == (shown, {"cents": 1, "password": HIDDEN})


def test_attempts_are_laid_out_in_time_and_the_shortest_is_still_seen() -> None:
    first = attempt(1, started_at=NOW + 10, ended_at=NOW + 20)
    last = attempt(2, started_at=NOW + 99.999, ended_at=NOW + 100)
    drawn = timeline(job(enqueued_at=NOW, finished_at=NOW + 100), [first, last], NOW + 500)
    assert (drawn.bars[0].x, drawn.bars[0].width) == (100.0, 100.0)
    assert drawn.bars[1].width >= 5
    assert drawn.bars[1].x + drawn.bars[1].width <= TIMELINE_WIDTH


def test_words_between_ticks_are_code_and_nothing_else_is_markup() -> None:
    assert str(ticks("run `a <b>` <i>")) == "run <code>a &lt;b&gt;</code> &lt;i&gt;"


def test_ages_have_no_digits_that_nobody_reads() -> None:
    assert [coarse(value) for value in (0.2, 59.6, 83.2, 3_700.0)] == ["0s", "60s", "83s", "1h2m"]


def test_what_is_dear_to_ask_is_asked_less_often() -> None:
    now_s, cost_s, asked = [0.0], [0.01], []

    def ask() -> int:
        now_s[0] += cost_s[0]
        asked.append(now_s[0])
        return len(asked)

    paced = SelfThrottled(ask, lambda: now_s[0])
    assert [paced.get(), paced.get()] == [1, 2]
    cost_s[0] = 0.25
    assert paced.get() == 3
    now_s[0] += 1.9
    assert paced.get() == 3
    now_s[0] += 0.2
    assert paced.get() == 4
    paced.forget()
    assert paced.get() == 5
    # Never so dear that nobody hears of it.
    cost_s[0] = 100.0
    paced.forget()
    assert paced.get() == 6
    now_s[0] += LONGEST_REST_S
    assert paced.get() == 7


def counted(minute: int, name: str, value: float, **labels: str) -> MinuteCount:
    return MinuteCount(minute, name, encode_labels(labels), value)


def test_every_minute_is_there_and_states_queues_and_causes_are_added_up() -> None:
    minutes = activity(
        [
            counted(101, JOBS_ENDED.name, 3, queue="a", state="succeeded"),
            counted(101, JOBS_ENDED.name, 2, queue="b", state="succeeded"),
            counted(101, JOBS_ENDED.name, 1, queue="a", state="failed"),
            counted(101, DEATHS.name, 1, process="runner", cause="signal"),
            counted(101, JOB_RUN.name, 4, le="0.1"),
        ],
        100,
        103,
    )
    assert [minute.at for minute in minutes] == [6000.0, 6060.0, 6120.0]
    assert minutes[1].ended == {"succeeded": 5, "failed": 1}
    assert minutes[1].ended_by_queue == {"a": 4, "b": 2}
    assert minutes[1].deaths == {"signal": 1}
    assert minutes[1].run_p50_s == pytest.approx(0.075)  # Halfway between 0.05 and 0.1.
    assert minutes[1].wait_p50_s is None
    assert minutes[0].ended == {}
    assert minutes[0].run_p95_s is None


def test_quantiles_are_found_in_their_bucket() -> None:
    buckets = {0.1: 50.0, 1.0: 40.0, 10.0: 10.0, math.inf: 0.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert quantile(buckets, 0.95) == pytest.approx(1.0 + 9.0 * 0.5)
    assert quantile({0.1: 0.0, math.inf: 5.0}, 0.5) == 0.1
    assert quantile({0.1: 0.0}, 0.5) is None
