"""Examine the facts: every check, the worst first. Pure: the same facts give the same findings."""

from collections.abc import Callable, Iterator

from unstuck.client.doctor.bell import check_bell
from unstuck.client.doctor.blocking import check_blocking
from unstuck.client.doctor.clocks import check_clocks
from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.containing import check_containment
from unstuck.client.doctor.dropped import check_dropped
from unstuck.client.doctor.facts import Facts, Limits, Trouble
from unstuck.client.doctor.failing import check_failing
from unstuck.client.doctor.finding import Finding, in_order, problem
from unstuck.client.doctor.fleet import check_fleet
from unstuck.client.doctor.flows import check_workflows
from unstuck.client.doctor.housekeeping import check_housekeeping
from unstuck.client.doctor.lining import check_lines
from unstuck.client.doctor.recovering import check_recovery
from unstuck.client.doctor.scheduled import check_scheduled
from unstuck.client.doctor.schedules import check_schedules
from unstuck.client.doctor.servers import check_servers
from unstuck.client.doctor.timing import check_timing
from unstuck.client.doctor.waiting import check_waiting
from unstuck.client.doctor.watch import check_watch
from unstuck.store.diagnosis import Diagnosis

Check = Callable[[Facts, Diagnosis, Limits], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_waiting,
    check_lines,
    check_failing,
    check_scheduled,
    check_workflows,
    check_schedules,
    check_recovery,
    check_fleet,
    check_dropped,
    check_clocks,
    check_watch,
    check_servers,
    check_blocking,
    check_bell,
    check_housekeeping,
    check_timing,
    check_containment,
)


def examine(facts: Facts, limits: Limits | None = None) -> list[Finding]:
    """Give everything that is worth a word; nothing that is a problem or a warning where all is well."""
    if facts.trouble is not None or facts.diagnosis is None:
        trouble = facts.trouble or Trouble("unreachable", "The ledger gave no answer.")
        limits = limits or Limits()
        blocking = list(check_blocking(facts, None, limits)) if trouble.kind == "busy" else []
        # What is in the way says more than that something is.
        return in_order([*(blocking or [in_trouble(trouble)]), *check_containment(facts, None, limits)])
    diagnosis = facts.diagnosis
    return in_order(finding for check in CHECKS for finding in check(facts, diagnosis, limits or Limits()))


def in_trouble(trouble: Trouble) -> Finding:
    """Say why nothing else can be said."""
    match trouble.kind:
        case "none":
            code, what = Code.NO_LEDGER, "There is no ledger here yet"
            cure = "Run `unstuck migrate`, start a worker or enqueue a job; or name another ledger with --url or --app."
        case "behind":
            code, what = Code.SCHEMA_BEHIND, "The tables or functions are older than this code"
            cure = "Run `unstuck migrate`; workers of the last release keep working meanwhile."
        case "ahead":
            code, what = Code.SCHEMA_AHEAD, "The tables are newer than this code and no longer work with it"
            cure = "Upgrade Unstuck here, or name another ledger with --url or --app."
        case "forked":
            code, what = Code.SCHEMA_FORKED, "The tables were made by a version that was never released"
            cure = "Name another ledger with --url or --app, or drop these tables if nothing in them is needed."
        case "busy":
            code, what = Code.LEDGER_UNREACHABLE, "The ledger did not answer in time"
            cure = "Look for long transactions in the database, and for its load. Then run the doctor again."
        case "standby":
            code, what = Code.STANDBY, "This database server is a standby"
            cure = (
                "Name the primary in the URL, or better all servers: postgresql://USER@HOST1,HOST2/DATABASE"
                "?target_session_attrs=primary. If the primary is lost, promote the standby (`pg_ctl promote`, `select "
                "pg_promote()`). Workers keep trying and go on by themselves."
            )
        case "unreachable":
            code, what = Code.LEDGER_UNREACHABLE, "The ledger cannot be reached"
            cure = (
                "Bring the database back, or mend the address (--url, --app, $UNSTUCK_URL). Workers keep trying "
                "and go on by themselves."
            )
    return problem(code, what, trouble.message, cure)
