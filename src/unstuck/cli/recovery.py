"""Commands that repair by hand: `retry`, `cancel`, `stale`, `quarantine` and pruning."""

import sys
import time
from typing import Annotated

import msgspec
import typer

from unstuck.cli.context import Context, UsageError, command, duration_s, job_id
from unstuck.cli.jobs import MAX_LISTED
from unstuck.cli.output import Cell, Column, Output, ago, coarse, confirm, count, state_cell
from unstuck.cli.selection import Error, OlderThan, Queue, State, Task, job_filter, states
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import CANCELLED_BY_DEFAULT, RETRIED_BY_DEFAULT, Quarantined, quarantined_view
from unstuck.client.operator.stale import StaleAction
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.contract.jobs import JobFilter

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Numbers of jobs.")]


@command()
def stale(
    common: Context,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="SILENCE",
            help="Of workers silent for at least so long. Default: 0s to list, each job's own timeout to settle.",
        ),
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Fail stale running jobs as WORKER_CRASHED.")] = False,
    requeue: Annotated[bool, typer.Option("--requeue", help="Give stale claimed jobs back to their queues.")] = False,
) -> None:
    """List jobs in the hands of workers that are silent, suspect or dead; settle them by hand.

    --requeue also takes running jobs of tasks with on_crash="retry" whose own timeout has passed; other running
    jobs may have had effects already, and only --fail ends them."""
    if fail and requeue:
        raise UsageError("Give either --fail or --requeue, not both.")
    threshold_s = duration_s(older_than, "--older-than")
    show = common.show
    with common.operator() as operator:
        found = operator.stale.list(threshold_s or 0.0)
        if not fail and not requeue:
            _list_stale(show, found, [])
            return
        done = operator.stale.fail(threshold_s) if fail else operator.stale.requeue(threshold_s)
    settled = {action.job_id for action in done}
    left = [action for action in found if action.job_id not in settled]
    if show.as_json:
        show.json(done)
        return
    verb = "Failed" if fail else "Re-queued"
    show.say(f"{verb} {count(len(done), 'stale job')}.", "green" if done else "")
    if done:
        _list_stale(show, done, left)
    for reason in _why_left(left, fail):
        show.note(reason)


def _list_stale(show: Output, found: list[StaleAction], left: list[StaleAction]) -> None:
    if show.as_json:
        show.json(found)
        return
    if not found:
        show.empty("No stale jobs: every worker that holds one beats.")
        return
    columns = [
        Column("job", right=True),
        Column("state"),
        Column("task", spare=True),
        Column("queue", spare=True),
        Column("worker"),
        Column("worker is"),
        Column("host", spare=True),
        Column("silent", right=True),
        Column("given up", right=True),
        Column("action"),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(action.job_id), "bold"),
                state_cell(action.state, mark=show.pretty),
                action.task,
                action.queue,
                action.worker_name or action.worker,
                state_cell(action.worker_state),
                action.host,
                coarse(action.silent_s),
                Cell(_given_up(action), "bright_black"),
                "" if action.action == "none" else Cell(action.action, "green"),
            ]
            for action in found
        ],
    )


def _given_up(action: StaleAction) -> str:
    return "at its deadline" if action.given_up_after_s is None else f"after {coarse(action.given_up_after_s)}"


def _why_left(left: list[StaleAction], fail: bool) -> list[str]:
    claimed = sum(action.state is JobState.CLAIMED for action in left)
    running = [action for action in left if action.state is JobState.RUNNING]
    reasons = []
    if fail:
        if claimed:
            reasons.append(f"Left {count(claimed, 'claimed job')}: user code never ran; --requeue gives them back.")
        if running:
            reasons.append(
                f"Left {count(len(running), 'running job')} whose timeout has not passed; --older-than insists."
            )
        return reasons
    unsafe = sum(action.on_crash == "fail" for action in running)
    if unsafe:
        reasons.append(
            f"Left {count(unsafe, 'running job')}: user code was at work and may have had effects; --fail ends them."
        )
    early = claimed + len(running) - unsafe
    if early:
        reasons.append(f"Left {count(early, 'job')} whose timeout has not passed.")
    return reasons


_RETRIED = {
    "queued": "queued again",
    "live": "not finished yet, nothing to retry",
    "succeeded": "succeeded, and a success is not run again",
    "missing": "does not exist",
    "duplicate": "its unique key is in use by another unfinished job",
}

_CANCELLED = {
    "cancelled": "cancelled",
    "requested": "is running; its worker was told to end it",
    "finished": "has ended already",
    "missing": "does not exist",
    "matched": "would be cancelled",
}

CHOOSE = "Give the numbers of jobs, or --error, --task, --queue, --state, --older-than to choose them; not both."


@command()
def retry(
    common: Context,
    ids: Ids = None,
    state: State = None,
    queue: Queue = None,
    task: Task = None,
    error: Error = None,
    older_than: OlderThan = None,
) -> None:
    """Queue finished jobs again with fresh counters: by number, or all that match.

    Without --state those that failed or are quarantined."""
    where = job_filter(state, queue, task, error, older_than)
    filtered = any(option is not None for option in (state, queue, task, error, older_than))
    if bool(ids) == filtered:
        raise UsageError(CHOOSE)
    numbers = [job_id(text) for text in ids or []]
    with common.operator() as operator:
        if filtered:
            where = msgspec.structs.replace(where, states=where.states or RETRIED_BY_DEFAULT)
            numbers = list(operator.jobs.matching(where))
        answers = operator.jobs.retry(numbers)
    _tell_outcomes(common.show, answers, _RETRIED, {"queued"}, strict=not filtered)


@command()
def cancel(
    common: Context,
    ids: Ids = None,
    state: State = None,
    queue: Queue = None,
    task: Task = None,
    error: Error = None,
    older_than: OlderThan = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which jobs it would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Cancel jobs, by number or all that match: those that wait at once, those that run through their worker.

    Without --state all that have not ended."""
    where = job_filter(state, queue, task, error, older_than)
    filtered = any(option is not None for option in (state, queue, task, error, older_than))
    if bool(ids) == filtered:
        raise UsageError(CHOOSE)
    numbers = [job_id(text) for text in ids or []]
    with common.operator() as operator:
        if filtered:
            found = _by_state(operator, where)
            numbers = [number for one in found.values() for number in one]
            if numbers and not (dry_run or yes):
                _confirm_cancel(found)
        answers = dict.fromkeys(numbers, "matched") if dry_run else operator.jobs.cancel(numbers)
    _tell_outcomes(common.show, answers, _CANCELLED, {"cancelled", "requested", "matched"}, strict=not filtered)


def _by_state(operator: Operator, where: JobFilter) -> dict[JobState, list[int]]:
    """Return the numbers of the jobs that match, by their states."""
    chosen = where.states or CANCELLED_BY_DEFAULT
    found = {one: list(operator.jobs.matching(msgspec.structs.replace(where, states=(one,)))) for one in chosen}
    return {one: numbers for one, numbers in found.items() if numbers}


def _confirm_cancel(found: dict[JobState, list[int]]) -> None:
    states_named = ", ".join(f"{len(numbers):,} {one.value}" for one, numbers in found.items())
    jobs = f"{count(sum(map(len, found.values())), 'job')} ({states_named})"
    if not sys.stdin.isatty():
        raise UsageError(
            f"This would cancel {jobs}. Say --yes if there is no terminal to ask on, or --dry-run to see them."
        )
    confirm(f"Cancel {jobs}?")


def _tell_outcomes(show: Output, answers: dict[int, str], words: dict[str, str], good: set[str], strict: bool) -> None:
    """Say what became of each; exits 1 where somebody named a job and it could not be done."""
    bad = [answer for answer in answers.values() if answer not in good]
    if show.as_json:
        show.json([{"id": number, "answer": answer} for number, answer in answers.items()])
    elif not answers:
        show.empty("No jobs match.")
    elif len(answers) > 20:
        done = {answer: list(answers.values()).count(answer) for answer in sorted(set(answers.values()))}
        show.say("; ".join(f"{count(number, 'job')}: {words[answer]}" for answer, number in done.items()))
    else:
        for number, answer in answers.items():
            show.rich(
                "Job ", Cell(str(number), "bold"), " ", Cell(words[answer], "green" if answer in good else "yellow")
            )
    show.missing(answers.values())
    if strict and bad:
        raise typer.Exit(1)


@command()
def prune(
    common: Context,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Ended before; default: the retention of jobs.")
    ] = None,
    state: State = None,
) -> None:
    """Remove finished jobs and what belongs to them."""
    age_s = duration_s(older_than, "--older-than")
    chosen = states(state)
    for word in chosen:
        if word not in FINAL_STATES:
            raise UsageError(f"A {word} job is not finished. --state takes: {', '.join(sorted(FINAL_STATES))}.")
    with common.operator() as operator:
        removed = operator.jobs.prune(age_s, chosen)
    if common.as_json:
        common.show.json({"pruned": removed})
    else:
        common.show.say(f"Removed {count(removed, 'finished job')}.", "green" if removed else "")


VICTIMS_SHOWN = 3


@command()
def quarantine(common: Context, ctx: typer.Context) -> None:
    """List the jobs that killed their processes too often, with what they killed. `unstuck retry` queues them again."""
    if ctx.invoked_subcommand is None:
        _list_quarantined(common, None, 100)


@command()
def list_quarantined(
    common: Context,
    task: Task = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")] = 100,
) -> None:
    """List quarantined jobs, newest first, with what they killed."""
    _list_quarantined(common, task, limit)


def _list_quarantined(common: Context, task: str | None, limit: int) -> None:
    with common.operator() as operator:
        found = operator.jobs.quarantined(task, limit)
    show = common.show
    if show.as_json:
        show.json([quarantined_view(job) for job in found])
        return
    if not found:
        show.empty("No job is quarantined.")
        return
    _table(show, found)
    if show.pretty:
        show.note("`unstuck why ID` tells the story of one; `unstuck retry ID` queues it again.")


def _table(show: Output, found: list[Quarantined]) -> None:
    now_s = time.time()
    columns = [
        Column("job", right=True),
        Column("task"),
        Column("queue", spare=True),
        Column("crashes", right=True),
        Column("since"),
        Column("killed", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(job.job_id), "bold"),
                job.task,
                job.queue,
                str(job.crash_count),
                Cell(ago(job.quarantined_at, now_s), "bright_black"),
                Cell(_killed(job), "red"),
            ]
            for job in found
        ],
        wrap=True,
    )


def _killed(job: Quarantined) -> str:
    """Name the last few: what it did lately says most."""
    named = [
        f"{victim.worker_name or victim.worker}{f' on {victim.host}' if victim.host else ''}: {victim.cause}"
        for victim in reversed(job.victims[-VICTIMS_SHOWN:])
    ]
    more = len(job.victims) - len(named)
    return "; ".join(named) + (f"; and {more} more (--json has all)" if more > 0 else "")
