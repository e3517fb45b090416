"""The operator's verbs: look, cancel, retry, pause, drain and settle by hand. Every door uses these."""

from unstuck.client.operator.admitting import AdmittingVerbs
from unstuck.client.operator.jobs import JobVerbs
from unstuck.client.operator.limits import CANCELLED_BY_DEFAULT as CANCELLED_BY_DEFAULT
from unstuck.client.operator.limits import EVENTS_SHOWN as EVENTS_SHOWN
from unstuck.client.operator.limits import LOOKED_UP as LOOKED_UP
from unstuck.client.operator.limits import MAX_JOB_ID as MAX_JOB_ID
from unstuck.client.operator.limits import MAX_REASON_CHARS as MAX_REASON_CHARS
from unstuck.client.operator.limits import PAGE as PAGE
from unstuck.client.operator.limits import RETRIED_BY_DEFAULT as RETRIED_BY_DEFAULT
from unstuck.client.operator.looking import LookingVerbs
from unstuck.client.operator.looking import Seen as Seen
from unstuck.client.operator.quarantine import QuarantineVerbs
from unstuck.client.operator.queues import QueueVerbs
from unstuck.client.operator.schedules import ScheduleVerbs
from unstuck.client.operator.signals import SignalVerbs
from unstuck.client.operator.stale import StaleVerbs
from unstuck.client.operator.workers import WorkerVerbs
from unstuck.client.operator.workflows import WorkflowVerbs
from unstuck.client.stale import StaleAction as StaleAction


class Operator(
    LookingVerbs,
    QuarantineVerbs,
    JobVerbs,
    SignalVerbs,
    StaleVerbs,
    QueueVerbs,
    ScheduleVerbs,
    WorkerVerbs,
    AdmittingVerbs,
    WorkflowVerbs,
):
    """What an operator can do with a ledger. `by` names who did it, in events, causes and the audit log; `door` says
    which way they came: cli, http, page or python."""
