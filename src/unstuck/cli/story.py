"""Tell the story of one job to a person: what it is, what became of it, every attempt and event."""

import json
import time
from datetime import datetime
from typing import Any

import msgspec

from unstuck.cli.show import Cell, Column, Show, ago, state_cell, took
from unstuck.client.why.beginnings import far
from unstuck.client.why.endings import one_line
from unstuck.domain.autopsy import Autopsy, ProgressMark
from unstuck.domain.states import FINAL, JobState
from unstuck.store.records import JobRecord

MAX_SHOWN_CHARS = 2_000
"""Of a call and of a result on a terminal."""
MAX_VALUE_CHARS = 200
"""Of what a step returned; `--json` has all of it."""


def tell_story(show: Show, record: JobRecord, view: dict[str, Any], printed: bool, *, full: bool = False) -> None:
    now_s = time.time()
    show.rich(Cell(f"Job {record.id}", "bold"), f"  {record.task}  ", state_cell(record.state, mark=show.pretty))
    call = ", ".join([*map(_json, view["args"]), *(f"{key}={_json(value)}" for key, value in view["kwargs"].items())])
    ran = took(record.started_at, record.finished_at)
    facts: list[tuple[str, Cell]] = [
        ("call", Cell(_short(f"{record.task}({call})", show, full))),
        ("queue", Cell(record.queue + (f", priority {record.priority}" if record.priority else ""))),
        (
            "enqueued",
            Cell(_when(record.enqueued_at, now_s) + (f" by {record.enqueued_by}" if record.enqueued_by else "")),
        ),
    ]
    if view["workflow"]:
        facts.append(("workflow", Cell(_place(view["workflow"]))))
    if record.unique_key:
        facts.append(("unique key", Cell(record.unique_key)))
    if record.state is JobState.PENDING and record.run_at > now_s + 1:
        facts.append(("due", Cell(_when(record.run_at, now_s))))
    if record.started_at is not None:
        facts.append(("started", Cell(_when(record.started_at, now_s))))
    if record.finished_at is not None:
        facts.append(("ended", Cell(_when(record.finished_at, now_s) + (f", after {ran}" if ran else ""))))
    if record.state is JobState.SUCCEEDED and record.result is not None:
        facts.append(("result", Cell(_short(_json(view["result"]), show, full), "green")))
    if record.error is not None:
        # Until the job has ended, this is only what became of an earlier try.
        name, style = ("error", "red") if record.state in FINAL else ("last try", "yellow")
        facts.append((name, Cell(f"{record.error.code}  {record.error.shown}", style)))
        if record.error.cause and record.error.cause != record.error.shown:
            facts.append(("cause", Cell(record.error.cause, style)))
    if record.crash_count:
        facts.append(("crashes", Cell(str(record.crash_count))))
    if record.cancel_requested and record.state not in FINAL and view["waiting"] is None:
        facts.append(("cancel", Cell("requested; its worker is told", "yellow")))
    if view["waiting"]:
        facts.append(("waiting", Cell(view["waiting"], "yellow")))
    if view["progress"]:
        facts.append(("progress", Cell(_progress(view["progress"], now_s))))
    show.facts(facts)
    _history(show, view, now_s)
    show.rich()
    show.rich(Cell(f"`unstuck why {record.id}` tells why, in order, and what you can do.", "bright_black"), indent=2)
    if printed:
        show.rich(Cell(f"`unstuck logs {record.id}` shows what it printed.", "bright_black"), indent=2)


def _history(show: Show, view: dict[str, Any], now_s: float) -> None:
    if view["attempts"]:
        show.rich()
        columns = [Column("attempt", right=True), Column("state"), Column("worker"), Column("started"), Column("took")]
        rows = []
        for number, attempt in enumerate(view["attempts"], 1):
            began, ended = _epoch(attempt["started_at"]), _epoch(attempt["ended_at"])
            rows.append(
                [
                    str(number),
                    state_cell(attempt["state"]),
                    attempt["worker_name"] or attempt["worker"] or "",
                    Cell(ago(began, now_s), "bright_black"),
                    took(began, ended),
                    Cell(_cause(attempt), "red" if attempt["state"] in ("failed", "crashed") else ""),
                ]
            )
        show.table([*columns, Column("cause", wide=True)], rows, indent=2, wrap=True)
    if view["journal"]:
        show.rich()
        columns = [
            Column("step", right=True),
            Column("kind"),
            Column("name"),
            Column("done"),
            Column("value", wide=True),
        ]
        rows = [
            [
                str(entry["seq"] or ""),
                entry["kind"],
                Cell(entry["name"], "bold"),
                Cell(ago(_epoch(entry["at"]), now_s), "bright_black"),
                _json(entry["value"])[:MAX_VALUE_CHARS],
            ]
            for entry in view["journal"]
        ]
        show.table(columns, rows, indent=2, wrap=True)
    if view["events"]:
        show.rich()
        columns = [Column("event"), Column("when"), Column("what", wide=True)]
        rows = [
            [Cell(event["kind"], "bold"), Cell(ago(_epoch(event["at"]), now_s), "bright_black"), event["message"]]
            for event in view["events"]
        ]
        show.table(columns, rows, indent=2, wrap=True)
    trace = ((view["error"] or {}).get("details") or {}).get("traceback")
    if trace:
        show.rich()
        for line in trace.rstrip().splitlines():
            show.quote(Cell(line, "bright_black"), indent=2)


def _cause(attempt: dict[str, Any]) -> str:
    if attempt["autopsy"] is not None:
        return one_line(msgspec.convert(attempt["autopsy"], Autopsy))
    return attempt["cause"] or ""


def _progress(progress: dict[str, Any], now_s: float) -> str:
    mark = ProgressMark(progress["done"], progress["total"], progress["message"])
    busy = _epoch(progress["busy_since"])
    said = [far(mark) or "a sign of life", ago(_epoch(progress["at"]), now_s)]
    return ", ".join([*said, *([f"busy in C code for {took(busy, now_s)}"] if busy is not None else [])])


def _place(workflow: dict[str, Any]) -> str:
    whole = f"{workflow['id']} ({workflow['name']}), {workflow['state']}"
    if workflow["node"] is None:
        return f"{whole}; `unstuck workflow {workflow['id']}` draws it"
    after = f", after {', '.join(workflow['after'])}" if workflow["after"] else ""
    return f"node {workflow['node']!r} of {whole}{after}"


def _when(at: float, now_s: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    return f"{ago(at, now_s)} ({clock})"


def _epoch(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(text: str, show: Show, full: bool) -> str:
    """Cut a long text for a terminal. A pipe gets all of it."""
    if full or not show.pretty or len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]}… ({len(text):,} characters; --full shows all)"
