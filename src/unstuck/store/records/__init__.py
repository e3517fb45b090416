"""Say what goes into the ledger and what comes out of it, in plain facts.

Times are seconds since the Unix epoch (UTC) for people to read; durations are seconds by the ledger's
own clock. Payloads and results are opaque bytes: nobody in this room decodes them.
"""

from unstuck.store.records.access import ApiTokenRecord as ApiTokenRecord
from unstuck.store.records.access import AuditRecord as AuditRecord
from unstuck.store.records.access import NewApiToken as NewApiToken
from unstuck.store.records.alerting import AlertEvent as AlertEvent
from unstuck.store.records.alerting import AlertTarget as AlertTarget
from unstuck.store.records.alerting import ConditionChange as ConditionChange
from unstuck.store.records.alerting import ConditionLook as ConditionLook
from unstuck.store.records.alerting import ConditionRecord as ConditionRecord
from unstuck.store.records.alerting import ConditionStep as ConditionStep
from unstuck.store.records.alerting import LateWorker as LateWorker
from unstuck.store.records.counting import Count as Count
from unstuck.store.records.counting import Fleet as Fleet
from unstuck.store.records.counting import MinuteCount as MinuteCount
from unstuck.store.records.exchanging import Exchange as Exchange
from unstuck.store.records.exchanging import ExchangeAnswer as ExchangeAnswer
from unstuck.store.records.exchanging import Letter as Letter
from unstuck.store.records.exchanging import OnceJob as OnceJob
from unstuck.store.records.handing import BeatAnswer as BeatAnswer
from unstuck.store.records.handing import Claimed as Claimed
from unstuck.store.records.handing import Done as Done
from unstuck.store.records.handing import Enqueued as Enqueued
from unstuck.store.records.handing import Entry as Entry
from unstuck.store.records.handing import FollowUp as FollowUp
from unstuck.store.records.handing import ForeignPulse as ForeignPulse
from unstuck.store.records.handing import Held as Held
from unstuck.store.records.handing import HeldJob as HeldJob
from unstuck.store.records.handing import NewJob as NewJob
from unstuck.store.records.handing import Output as Output
from unstuck.store.records.handing import Progress as Progress
from unstuck.store.records.handing import Pulse as Pulse
from unstuck.store.records.handing import TaskRecord as TaskRecord
from unstuck.store.records.handing import Ties as Ties
from unstuck.store.records.handing import Turn as Turn
from unstuck.store.records.handing import TurnAnswer as TurnAnswer
from unstuck.store.records.handing import Wish as Wish
from unstuck.store.records.handing import WorkerBirth as WorkerBirth
from unstuck.store.records.journal import JournalRecord as JournalRecord
from unstuck.store.records.journal import SignalRecord as SignalRecord
from unstuck.store.records.requesting import OnceAnswer as OnceAnswer
from unstuck.store.records.requesting import Request as Request
from unstuck.store.records.showing import AttemptRecord as AttemptRecord
from unstuck.store.records.showing import EventRecord as EventRecord
from unstuck.store.records.showing import HostRecord as HostRecord
from unstuck.store.records.showing import JobFilter as JobFilter
from unstuck.store.records.showing import JobRecord as JobRecord
from unstuck.store.records.showing import Outcome as Outcome
from unstuck.store.records.showing import OutputRecord as OutputRecord
from unstuck.store.records.showing import QueueRecord as QueueRecord
from unstuck.store.records.showing import WorkerRecord as WorkerRecord
from unstuck.store.records.telling import Glance as Glance
from unstuck.store.records.watching import Guard as Guard
from unstuck.store.records.watching import GuardDead as GuardDead
from unstuck.store.records.watching import GuardNone as GuardNone
from unstuck.store.records.watching import GuardSilent as GuardSilent
from unstuck.store.records.watching import GuardSuspect as GuardSuspect
from unstuck.store.records.watching import Promoted as Promoted
from unstuck.store.records.watching import Swept as Swept
from unstuck.store.records.watching import WorkerVerdict as WorkerVerdict
from unstuck.store.records.watching import WorkerWatch as WorkerWatch
from unstuck.store.records.watching import read_verdict as read_verdict
