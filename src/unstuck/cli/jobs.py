"""Commands that look at jobs: list them, show one, its output and its stack, and send it a signal."""

import json
import time
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from unstuck.cli.context import Context, UsageError, command, job_id
from unstuck.cli.output import Cell, Column, Output, ago, count, one_line, state_cell, took
from unstuck.cli.selection import Error, NewerThan, OlderThan, Queue, State, Task, job_filter
from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import PAGE
from unstuck.client.why.autopsies import cause_line
from unstuck.client.why.story import far
from unstuck.domain.autopsy import Autopsy, ProgressMark
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.domain.text import did_you_mean
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.jobs import JobFilter, JobRecord

MAX_SHOWN_CHARS = 2_000
"""Of a call and of a result on a terminal."""
MAX_VALUE_CHARS = 200
"""Of what a step returned; `--json` has all of it."""


def print_job(show: Output, record: JobRecord, view: dict[str, Any], printed: bool, *, full: bool = False) -> None:
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
        name, style = ("error", "red") if record.state in FINAL_STATES else ("last try", "yellow")
        facts.append((name, Cell(f"{record.error.code}  {record.error.shown}", style)))
        if record.error.cause and record.error.cause != record.error.shown:
            facts.append(("cause", Cell(record.error.cause, style)))
    if record.crash_count:
        facts.append(("crashes", Cell(str(record.crash_count))))
    if record.cancel_requested and record.state not in FINAL_STATES and view["waiting"] is None:
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


def _history(show: Output, view: dict[str, Any], now_s: float) -> None:
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
        return cause_line(msgspec.convert(attempt["autopsy"], Autopsy))
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


def _short(text: str, show: Output, full: bool) -> str:
    """Cut a long text for a terminal. A pipe gets all of it."""
    if full or not show.pretty or len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]}… ({len(text):,} characters; --full shows all)"


@command()
def signal(
    common: Context,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal that it waits for.")],
    value: Annotated[str | None, typer.Argument(metavar="[VALUE]", help="What comes with it, as JSON.")] = None,
) -> None:
    """Send a signal to a job that waits for it, now or later (`ctx.wait_signal`)."""
    number = job_id(id)
    try:
        data = b"null" if value is None else value.encode()
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise UsageError(f"VALUE must be JSON ({error}). Write text as '\"text\"'.") from None
    with common.operator() as operator:
        answer = operator.jobs.signal(number, name, data)
    if common.as_json:
        common.show.json({"id": number, "signal": name, "answer": answer})
        return
    what = "and goes on" if answer == "woken" else "and takes it when it comes to it"
    common.show.say(f"Job {number} was sent signal {name!r} {what}.", "green")


NOT_TOLD = 1


@command()
def stack(
    common: Context,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.1, max=600.0, help="At most so long.")] = 10,
) -> None:
    """Show where a running job stands: the stacks of its threads, or where it awaits."""
    number = job_id(id)
    with common.operator() as operator:
        told = operator.jobs.stack(number, patience_s=wait)
    if common.as_json:
        common.show.json(None if told is None else {"job": number, "at": views.instant(told.at), "stack": told.message})
    elif told is not None:
        for line in told.message.rstrip().splitlines():
            common.show.quote(Cell(line), 0)
    if told is None:
        common.show.note(
            f"Job {number} does not run, or its worker did not answer within {wait:g}s: it may be frozen, or cannot "
            f"hear the bell. `unstuck doctor {number}` tells which."
        )
        raise typer.Exit(NOT_TOLD)


MAX_LISTED = 100_000


@command()
def jobs(
    common: Context,
    state: State = None,
    queue: Queue = None,
    task: Task = None,
    error: Error = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="WORKER", help="In the hands of this worker (id or name).")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")] = 100,
) -> None:
    """List jobs, newest first."""
    where = job_filter(state, queue, task, error, older_than, newer_than)
    with common.operator() as operator:
        worker_id = operator.workers.find(worker).id if worker is not None else None
        found = _first(operator, where, worker_id, limit)
    if common.as_json:
        common.show.json([views.job_summary(job) for job in found])
        return
    if not found:
        codes = [code.value for code in ErrorCode]
        hint = did_you_mean(where.error, codes) if where.error and where.error not in codes else ""
        common.show.empty(f"No jobs match.{hint}")
        return
    _list(common.show, found)
    if len(found) == limit and common.show.pretty:
        common.show.note(f"The newest {count(limit, 'job')}; --limit shows more.")


def _first(operator: Operator, where: JobFilter, worker_id: str | None, limit: int) -> list[JobRecord]:
    found: list[JobRecord] = []
    while len(found) < limit:
        size = min(PAGE, limit - len(found))
        before_id = found[-1].id if found else None
        page = operator.ledger.jobs.list(
            msgspec.structs.replace(where, worker_id=worker_id, before_id=before_id, limit=size)
        )
        found += page
        if len(page) < size:
            break
    return found


def _list(show: Output, found: list[JobRecord]) -> None:
    now_s = time.time()
    columns = [
        Column("id", right=True),
        Column("state"),
        Column("task"),
        Column("queue"),
        Column("enqueued"),
        Column("took", right=True, spare=True),
        Column("tries", right=True, spare=True),
        Column("note", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(job.id), "bold"),
                state_cell(job.state, mark=show.pretty),
                job.task,
                job.queue,
                Cell(ago(job.enqueued_at, now_s), "bright_black"),
                took(job.started_at, job.finished_at or (now_s if job.state is JobState.RUNNING else None)),
                str(job.attempt),
                _remark(job, now_s),
            ]
            for job in found
        ],
    )


def _remark(job: JobRecord, now_s: float) -> Cell:
    if job.error is not None:
        # An exception without words, like most MemoryErrors, is told by its type.
        said = job.error.cause or job.error.shown
        what = f"{job.error.code}: {one_line(said)}"
        return Cell(what, "red") if job.state in FINAL_STATES else Cell(f"last try: {what}", "yellow")
    if job.cancel_requested:
        return Cell("cancel requested", "yellow")
    if job.awaits_signal is not None:
        return Cell(f"waits for signal {job.awaits_signal!r}", "yellow")
    if job.state is JobState.WAITING:
        return Cell(f"sleeps, goes on {ago(job.run_at, now_s)}", "yellow")
    if job.state is JobState.PENDING and job.run_at > now_s + 1:
        return Cell(f"due {ago(job.run_at, now_s)}", "bright_black")
    return Cell("")


@command()
def job(
    common: Context,
    id: Annotated[str, typer.Argument(metavar="ID", help="The job's number.")],
    full: Annotated[bool, typer.Option("--full", help="All of a long call or result, on a terminal too.")] = False,
) -> None:
    """Tell the story of one job: state, result or error, every attempt and event."""
    number = job_id(id)
    with common.operator() as operator:
        view = operator.jobs.detail(number)
        record = operator.jobs.get(number)
        printed = bool(operator.jobs.outputs(number))
    if common.as_json:
        common.show.json(view)
    else:
        print_job(common.show, record, view, printed, full=full)


@command()
def logs(
    common: Context,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="On a terminal too: byte by byte, with colours and escape sequences.")
    ] = False,
) -> None:
    """Give what a job printed: its stdout on stdout, its stderr on stderr."""
    number = job_id(id)
    with common.operator() as operator:
        outputs = operator.jobs.outputs(number)
    if common.as_json:
        common.show.json([views.output_view(output) for output in outputs])
        return
    if not outputs:
        common.show.note(f"Job {number} printed nothing, or has not handed in yet what it printed.")
    for at, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            common.show.note(f"── attempt {at} of {len(outputs)} ──")
        common.show.output(output.stdout, output.stderr, raw=raw)
