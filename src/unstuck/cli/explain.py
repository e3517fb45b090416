"""The commands `why` and `doctor`: explain one job, or find what is wrong."""

import time
from itertools import groupby
from typing import Annotated

import typer

from unstuck.cli.context import Context, command, job_id, naming_the_ledger
from unstuck.cli.output import Cell, Output, ago, count, one_line, state_cell
from unstuck.client.doctor.diagnose import diagnose, diagnose_job
from unstuck.client.doctor.findings import Finding
from unstuck.client.why.story import Quote, Step, StepKind, Story, story_view
from unstuck.config import ledger_name
from unstuck.domain.conditions import Severity

FIRST_LINES = 10
LAST_LINES = 6
"""Of a longer quote the middle is left out on a terminal: the ends of a stack say most."""
QUOTE_INDENT = 12

_STYLES = {
    StepKind.DIED: "red",
    StepKind.FAILED: "red",
    StepKind.ENDED: "red",
    StepKind.DRAINED: "yellow",
    StepKind.CANCELLED: "yellow",
    StepKind.OPERATOR: "cyan",
    StepKind.STEP: "green",
    StepKind.SUCCEEDED: "green",
    StepKind.NOTIFIED: "bright_black",
    StepKind.OMITTED: "bright_black",
}


@command()
def why(common: Context, id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")]) -> None:
    """Tell what happened to a job and why, what is next, and what you can do."""
    number = job_id(id)
    with common.operator() as operator:
        story = operator.why(number)
    if common.as_json:
        common.show.json(story_view(story))
    else:
        show_story(common.show, story)


def show_story(show: Output, story: Story) -> None:
    job = story.job
    show.rich(Cell(f"Job {job.id}", "bold"), f"  {job.task}  ", state_cell(job.state, mark=show.pretty))
    show.rich(Cell(one_line(story.headline), "bold"))
    relative = max(len(ago(step.at, story.told_at)) for step in story.steps)
    for day, steps in groupby(story.steps, key=lambda step: _day(step.at)):
        show.rich()
        show.rich(Cell(day, "bright_black"))
        for step in steps:
            _show_step(show, step, story.told_at, relative)
    show.rich()
    show.rich(Cell("What happens next", "bold"))
    show.rich(one_line(story.next), indent=2)
    if story.actions:
        show.rich()
        show.rich(Cell("What you can do", "bold"))
        show.facts([(action.command, Cell(action.why)) for action in story.actions], names="green")


def _show_step(show: Output, step: Step, now_s: float, relative: int) -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(step.at))
    show.facts(
        [(f"{clock}  {ago(step.at, now_s).ljust(relative)}", Cell(one_line(step.text), _STYLES.get(step.kind, "")))]
    )
    for quote in step.quotes:
        show.rich(Cell(f"{quote.title}:", "bright_black"), indent=QUOTE_INDENT - 2)
        for line in _shortened(quote, show.pretty):
            show.quote(Cell(line, "dim"), QUOTE_INDENT)


def _shortened(quote: Quote, cut: bool) -> list[str]:
    lines = quote.text.rstrip().splitlines()
    left_out = len(lines) - FIRST_LINES - LAST_LINES
    # A hint in place of one or two lines would save nothing.
    if cut and left_out > 2:
        lines[FIRST_LINES:-LAST_LINES] = [f"… {count(left_out, 'line')} left out; --json has all …"]
    return lines


def _day(at: float) -> str:
    return time.strftime("%A %Y-%m-%d (%Z)", time.localtime(at))


STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "cyan"}
MARKS = {Severity.PROBLEM: "✗", Severity.WARNING: "!", Severity.INFO: "·"}
FOUND_A_PROBLEM = 1


@command()
def doctor(
    common: Context,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="One job: why it is not running.", show_default=False)
    ] = None,
) -> None:
    """Say what is wrong, why, and the cure. Exits 1 if there is at least one problem."""
    settings = common.settings()
    with naming_the_ledger(settings):
        findings = diagnose(settings) if job is None else diagnose_job(settings, job_id(job))
    if common.as_json:
        common.show.json(findings)
    else:
        if job is None:
            common.show.facts([("ledger", Cell(ledger_name(settings)))], indent=0)
            common.show.line()
        _tell(common.show, findings, whole=job is None)
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        raise typer.Exit(FOUND_A_PROBLEM)


def _tell(show: Output, findings: list[Finding], whole: bool) -> None:
    for finding in findings:
        style = STYLES[finding.severity]
        mark = f"{MARKS[finding.severity]} " if show.pretty else ""
        show.rich(Cell(f"{mark}{finding.severity}", style), "  ", Cell(finding.what, "bold"))
        lines = [("why", Cell(finding.why)), ("cure", Cell(finding.cure, "green")), ("code", Cell(finding.code, "dim"))]
        show.facts([(name, cell) for name, cell in lines if cell.text], indent=4)
        show.line()
    if whole:
        _sum_up(show, findings)


def _sum_up(show: Output, findings: list[Finding]) -> None:
    tally = [sum(finding.severity is severity for finding in findings) for severity in Severity]
    problems, warnings, _ = tally
    if not problems and not warnings:
        show.say("All is well: no problems, no warnings.", "bold green")
        return
    parts = [count(number, noun) for number, noun in ((problems, "problem"), (warnings, "warning")) if number]
    show.say(f"{' and '.join(parts)}.", "bold red" if problems else "bold yellow")
