"""A trace goes from the enqueue through every attempt, whichever processes they were in."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.crash.conftest import MakeFleet
from tests.fleet import ROOT, Fleet, wait_for

TARGET = "tests.crash.traced_tasks:app"

ENQUEUE = """
import sys
from tests.crash import traced_tasks

with traced_tasks.tracer.start_as_current_span("checkout"):
    job = traced_tasks.charge.enqueue()
    many = traced_tasks.notify.enqueue_many([("ann",), ("bob",)])
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
    assert fleet.app.operator.job_view(1)["args"] == []


def test_who_does_not_trace_stores_nothing_and_imports_nothing(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    record = fleet.ledger.job(job.id)
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
