"""What happens to jobs and workers is counted once, whoever saw it, and can be scraped."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.crash.conftest import MakeFleet
from tests.support.fleet import ROOT, Fleet, wait_for
from tests.support.http_server import serving
from tests.support.signals import send_signal

from unstuck import TaskFailed

QUICK = {"heartbeat_interval": "0.2s", "check_interval": "0.2s"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for (found, of), value in samples.items() if found == name and labels.items() <= dict(of).items())


def scraped(client: httpx.Client) -> Samples:
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.text)


def wait_counted(look: Callable[[], Samples], name: str, count: float, **labels: str) -> Samples:
    """Wait until it is counted: whoever counted it writes it with one of its next beats."""
    seen: list[Samples] = []

    def enough() -> bool:
        seen[:] = [look()]
        return total(seen[0], name, **labels) >= count

    wait_for(enough, f"{name} {labels} to be {count}")
    return seen[0]


def drain(tasks: Iterable[object]) -> None:
    for job in tasks:
        job.result(timeout=60)  # type: ignore[attr-defined]


def test_jobs_deaths_retries_and_beats_are_counted_once_and_scraped(make_fleet: MakeFleet, url: str) -> None:
    fleet: Fleet = make_fleet(**QUICK)
    worker = fleet.start("--concurrency", "2")
    drain(fleet.task("add").enqueue_many([(n, n) for n in range(20)]))
    drain(fleet.task("add_async").enqueue_many([(n, n) for n in range(5)]))
    with pytest.raises(TaskFailed):
        fleet.task("fail").enqueue().result(timeout=60)
    died, runner = fleet.begin("nap", 60)
    send_signal(runner, signal.SIGKILL)
    fleet.wait_final(died)
    with serving(url) as client:
        samples = wait_counted(lambda: scraped(client), "unstuck_jobs_ended_total", 27)
        assert total(samples, "unstuck_jobs_ended_total", queue="default", state="succeeded") == 25
        assert total(samples, "unstuck_jobs_ended_total", queue="default", state="failed") == 2
        assert total(samples, "unstuck_job_run_seconds_count", task="add") == 20
        assert total(samples, "unstuck_job_run_seconds_bucket", task="add", le="+Inf") == 20
        assert total(samples, "unstuck_job_run_seconds_count", task="fail") == 3
        assert total(samples, "unstuck_job_retries_total", queue="default", code="TASK_FAILED") == 2
        assert total(samples, "unstuck_job_wait_seconds_count") == 29
        assert 0 < total(samples, "unstuck_job_wait_seconds_sum", task="add") < 20 * 60
        assert total(samples, "unstuck_deaths_total", process="runner", cause="signal", detector="runner") == 1
        assert total(samples, "unstuck_death_detection_seconds_count", process="runner") == 1
        assert total(samples, "unstuck_superseded_writes_total") == 0
        samples = wait_counted(lambda: scraped(client), "unstuck_beat_delay_seconds_count", 1)
        assert total(samples, "unstuck_workers", state="active") == 1
        assert total(samples, "unstuck_queue_workers", queue="default") == 1
        assert total(samples, "unstuck_jobs", queue="default") == 0
        # The last words of a worker that stops are counted too.
        drain([fleet.task("add").enqueue(1, 1)])
        assert worker.stop() == 0
        fleet.task("add").options(delay=3600).enqueue(1, 1)
        fleet.task("add").enqueue(1, 1)
        samples = wait_counted(lambda: scraped(client), "unstuck_jobs_ended_total", 28)
        assert total(samples, "unstuck_jobs_ended_total") == 28
        assert total(samples, "unstuck_sweep_seconds_count") >= 1
        minutes = fleet.app.operator.activity(60)
        assert sum(minute.ended.get("succeeded", 0) for minute in minutes) == 26
        assert sum(minute.ended.get("failed", 0) for minute in minutes) == 2
        assert sum(minute.deaths.get("signal", 0) for minute in minutes) == 1
        assert any(minute.run_p95_s is not None and minute.wait_p50_s is not None for minute in minutes)
        assert total(samples, "unstuck_jobs", state="scheduled") == 1
        assert total(samples, "unstuck_jobs", state="pending") == 1
        assert total(samples, "unstuck_workers", state="stopped") == 1
        assert total(samples, "unstuck_queue_workers", queue="default") == 0


def test_a_killed_worker_is_one_death_and_its_jobs_are_requeued_once(make_fleet: MakeFleet, url: str) -> None:
    fleet: Fleet = make_fleet(**QUICK)
    victim = fleet.start("--concurrency", "2")
    jobs = [fleet.begin("nap_once_then_quick", 60)[0] for _ in range(2)]
    others = [fleet.start() for _ in range(2)]
    victim.kill()
    drain(jobs)
    with serving(url) as client:
        samples = wait_counted(lambda: scraped(client), "unstuck_jobs_ended_total", 2, state="succeeded")
        samples = wait_counted(lambda: scraped(client), "unstuck_deaths_total", 1, process="worker")
        assert total(samples, "unstuck_deaths_total", process="worker") == 1
        # Counted by another worker than the death, if that one gave the jobs back.
        samples = wait_counted(lambda: scraped(client), "unstuck_jobs_requeued_total", 2)
        assert total(samples, "unstuck_jobs_requeued_total", queue="default") == 2
        assert total(samples, "unstuck_jobs_ended_total") == 2
        assert total(samples, "unstuck_workers", state="dead") == 1
        assert total(samples, "unstuck_sweep_overdue_seconds") < 60
    assert all(other.stop() == 0 for other in others)


TARGET = "tests.crash.apps.tracing:app"

ENQUEUE = """
import sys
from tests.crash.apps import tracing

with tracing.tracer.start_as_current_span("checkout"):
    job = tracing.charge.enqueue()
    many = tracing.notify.enqueue_many([("ann",), ("bob",)])
assert job.result(timeout=60) == 2
assert [one.result(timeout=60) for one in many] == ["ann", "bob"]
"""


def spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return sorted((span for span in found if span["name"] == name), key=lambda span: str(span["start_time"]))


def test_one_trace_from_the_enqueue_through_a_retry(make_fleet: MakeFleet, url: str, tmp_path: Path) -> None:
    fleet: Fleet = make_fleet()
    traces = tmp_path / "spans"
    fleet.start("--concurrency", "2", TRACE_FILE=str(traces), target=TARGET)
    subprocess.run(
        [sys.executable, "-c", ENQUEUE],
        cwd=ROOT,
        env={**fleet.surroundings(), "TRACE_FILE": str(traces)},
        check=True,
        timeout=120,
    )
    found = wait_for(lambda: spans(traces) if len(spans(traces)) >= 11 else None, "all spans")
    [checkout] = named(found, "checkout")
    assert {span["context"]["trace_id"] for span in found} == {checkout["context"]["trace_id"]}
    [sent] = named(found, "send charge")
    assert sent["parent_id"] == checkout["context"]["span_id"]
    assert sent["kind"] == "SpanKind.PRODUCER"
    first, second = named(found, "process charge")
    assert {first["parent_id"], second["parent_id"]} == {sent["context"]["span_id"]}
    assert [span["attributes"]["unstuck.attempt"] for span in (first, second)] == [1, 2]
    assert first["attributes"]["unstuck.job.id"] == sent["attributes"]["unstuck.job.id"]
    assert first["attributes"]["unstuck.outcome"] == "raised"
    assert first["status"]["status_code"] == "ERROR"
    assert first["events"][0]["attributes"]["exception.message"] == "the bank is closed"
    assert second["attributes"]["unstuck.outcome"] == "succeeded"
    calls = named(found, "call the bank")
    assert [span["parent_id"] for span in calls] == [first["context"]["span_id"], second["context"]["span_id"]]
    [many] = named(found, "send notify")
    assert many["attributes"]["messaging.batch.message_count"] == 2
    attempts = named(found, "process notify")
    assert {span["parent_id"] for span in attempts} == {many["context"]["span_id"]}
    mails = [*named(found, "mail to ann"), *named(found, "mail to bob")]
    assert {span["parent_id"] for span in mails} == {span["context"]["span_id"] for span in attempts}
    # People see the arguments, not the trace that travels with them.
    assert fleet.app.operator.jobs.detail(1)["args"] == []


def test_who_does_not_trace_stores_nothing_and_imports_nothing(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    record = fleet.ledger.jobs.get(job.id)
    assert record is not None
    assert record.payload == b'{"args":[1,2]}'
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, unstuck, unstuck.cli.main, unstuck.runner.child; "
            "print([name for name in sys.modules if name.startswith('opentelemetry')])",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == "[]"
