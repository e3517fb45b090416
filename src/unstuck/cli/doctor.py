"""Ask the doctor: `doctor` looks at the whole system, `doctor JOB` at one job."""

from typing import Annotated

import typer

from unstuck.cli.common import Common, command, job_id, naming_the_ledger
from unstuck.cli.show import Cell, Show, count
from unstuck.client.doctor.codes import Severity
from unstuck.client.doctor.finding import Finding
from unstuck.client.doctor.visiting import visit, visit_job
from unstuck.config import ledger_name

STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "cyan"}
MARKS = {Severity.PROBLEM: "✗", Severity.WARNING: "!", Severity.INFO: "·"}
FOUND_A_PROBLEM = 1


@command()
def doctor(
    common: Common,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="One job: why it is not running.", show_default=False)
    ] = None,
) -> None:
    """Say what is wrong, why, and the cure. Exits 1 if there is at least one problem."""
    settings = common.settings()
    with naming_the_ledger(settings):
        findings = visit(settings) if job is None else visit_job(settings, job_id(job))
    if common.as_json:
        common.show.json(findings)
    else:
        if job is None:
            common.show.facts([("ledger", Cell(ledger_name(settings)))], indent=0)
            common.show.line()
        _tell(common.show, findings, whole=job is None)
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        raise typer.Exit(FOUND_A_PROBLEM)


def _tell(show: Show, findings: list[Finding], whole: bool) -> None:
    for finding in findings:
        style = STYLES[finding.severity]
        mark = f"{MARKS[finding.severity]} " if show.pretty else ""
        show.rich(Cell(f"{mark}{finding.severity}", style), "  ", Cell(finding.what, "bold"))
        lines = [("why", Cell(finding.why)), ("cure", Cell(finding.cure, "green")), ("code", Cell(finding.code, "dim"))]
        show.facts([(name, cell) for name, cell in lines if cell.text], indent=4)
        show.line()
    if whole:
        _sum_up(show, findings)


def _sum_up(show: Show, findings: list[Finding]) -> None:
    tally = [sum(finding.severity is severity for finding in findings) for severity in Severity]
    problems, warnings, _ = tally
    if not problems and not warnings:
        show.say("All is well: no problems, no warnings.", "bold green")
        return
    parts = [count(number, noun) for number, noun in ((problems, "problem"), (warnings, "warning")) if number]
    show.say(f"{' and '.join(parts)}.", "bold red" if problems else "bold yellow")
