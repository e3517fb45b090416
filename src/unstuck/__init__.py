"""Unstuck: durable background jobs for Python that survive the death of their workers."""

from typing import TYPE_CHECKING, Any

from unstuck.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from unstuck.app import App as App
    from unstuck.client.job import Job as Job
    from unstuck.client.stale import StaleAction as StaleAction
    from unstuck.client.task import Task as Task
    from unstuck.client.workflow import Group as Group
    from unstuck.client.workflow import Node as Node
    from unstuck.client.workflow import Workflow as Workflow
    from unstuck.client.workflow import WorkflowRun as WorkflowRun
    from unstuck.config import Recovery as Recovery
    from unstuck.config import Retention as Retention
    from unstuck.domain.errors import CallFailed as CallFailed
    from unstuck.domain.errors import ConfigError as ConfigError
    from unstuck.domain.errors import DeadlineExceeded as DeadlineExceeded
    from unstuck.domain.errors import DuplicateJob as DuplicateJob
    from unstuck.domain.errors import ErrorCode as ErrorCode
    from unstuck.domain.errors import JobCancelled as JobCancelled
    from unstuck.domain.errors import JobExpired as JobExpired
    from unstuck.domain.errors import JobFailed as JobFailed
    from unstuck.domain.errors import JobNotFound as JobNotFound
    from unstuck.domain.errors import JobQuarantined as JobQuarantined
    from unstuck.domain.errors import LedgerBusy as LedgerBusy
    from unstuck.domain.errors import LedgerError as LedgerError
    from unstuck.domain.errors import LedgerReplaced as LedgerReplaced
    from unstuck.domain.errors import LedgerStandby as LedgerStandby
    from unstuck.domain.errors import LedgerUnavailable as LedgerUnavailable
    from unstuck.domain.errors import LineClosed as LineClosed
    from unstuck.domain.errors import MigrationBlocked as MigrationBlocked
    from unstuck.domain.errors import NameTaken as NameTaken
    from unstuck.domain.errors import NoLedger as NoLedger
    from unstuck.domain.errors import NoWorkers as NoWorkers
    from unstuck.domain.errors import OutOfMemory as OutOfMemory
    from unstuck.domain.errors import PayloadError as PayloadError
    from unstuck.domain.errors import RefusedValue as RefusedValue
    from unstuck.domain.errors import ReplyTimeout as ReplyTimeout
    from unstuck.domain.errors import ResultNotAvailable as ResultNotAvailable
    from unstuck.domain.errors import ResultNotStorable as ResultNotStorable
    from unstuck.domain.errors import ResultTimeout as ResultTimeout
    from unstuck.domain.errors import SchemaAhead as SchemaAhead
    from unstuck.domain.errors import SchemaForked as SchemaForked
    from unstuck.domain.errors import SchemaMismatch as SchemaMismatch
    from unstuck.domain.errors import SignalRefused as SignalRefused
    from unstuck.domain.errors import SignalTimeout as SignalTimeout
    from unstuck.domain.errors import Stalled as Stalled
    from unstuck.domain.errors import StepMismatch as StepMismatch
    from unstuck.domain.errors import TaskFailed as TaskFailed
    from unstuck.domain.errors import TooManySteps as TooManySteps
    from unstuck.domain.errors import UncertainCommit as UncertainCommit
    from unstuck.domain.errors import UnknownName as UnknownName
    from unstuck.domain.errors import UnknownQueue as UnknownQueue
    from unstuck.domain.errors import UnknownSchedule as UnknownSchedule
    from unstuck.domain.errors import UnknownTask as UnknownTask
    from unstuck.domain.errors import UnknownWorker as UnknownWorker
    from unstuck.domain.errors import UnstuckError as UnstuckError
    from unstuck.domain.errors import WorkerCrashed as WorkerCrashed
    from unstuck.domain.errors import WorkflowNotFound as WorkflowNotFound
    from unstuck.domain.errors import WrongArguments as WrongArguments
    from unstuck.domain.events import Event as Event
    from unstuck.domain.events import EventKind as EventKind
    from unstuck.domain.inputs import NodeError as NodeError
    from unstuck.domain.retry import Retry as Retry
    from unstuck.domain.states import JobState as JobState
    from unstuck.runner.context import Context as Context
    from unstuck.runner.context import current_context as current_context
    from unstuck.runner.steps import step as step
    from unstuck.runner.termination import StopRequested as StopRequested

__all__ = [
    "App",
    "CallFailed",
    "ConfigError",
    "Context",
    "DeadlineExceeded",
    "DuplicateJob",
    "ErrorCode",
    "Event",
    "EventKind",
    "Group",
    "Job",
    "JobCancelled",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "JobQuarantined",
    "JobState",
    "LedgerBusy",
    "LedgerError",
    "LedgerReplaced",
    "LedgerStandby",
    "LedgerUnavailable",
    "LineClosed",
    "MigrationBlocked",
    "NameTaken",
    "NoLedger",
    "NoWorkers",
    "Node",
    "NodeError",
    "OutOfMemory",
    "PayloadError",
    "Recovery",
    "RefusedValue",
    "ReplyTimeout",
    "ResultNotAvailable",
    "ResultNotStorable",
    "ResultTimeout",
    "Retention",
    "Retry",
    "SchemaAhead",
    "SchemaForked",
    "SchemaMismatch",
    "SignalRefused",
    "SignalTimeout",
    "StaleAction",
    "Stalled",
    "StepMismatch",
    "StopRequested",
    "Task",
    "TaskFailed",
    "TooManySteps",
    "UncertainCommit",
    "UnknownName",
    "UnknownQueue",
    "UnknownSchedule",
    "UnknownTask",
    "UnknownWorker",
    "UnstuckError",
    "WorkerCrashed",
    "Workflow",
    "WorkflowNotFound",
    "WorkflowRun",
    "WrongArguments",
    "current_context",
    "step",
]

# Everything else is an error.
_HOMES = {
    "App": "unstuck.app",
    "Context": "unstuck.runner.context",
    "Event": "unstuck.domain.events",
    "EventKind": "unstuck.domain.events",
    "Group": "unstuck.client.workflow",
    "Job": "unstuck.client.job",
    "JobState": "unstuck.domain.states",
    "Node": "unstuck.client.workflow",
    "NodeError": "unstuck.domain.inputs",
    "Recovery": "unstuck.config",
    "Retention": "unstuck.config",
    "Retry": "unstuck.domain.retry",
    "StaleAction": "unstuck.client.stale",
    "StopRequested": "unstuck.runner.termination",
    "Task": "unstuck.client.task",
    "Workflow": "unstuck.client.workflow",
    "WorkflowRun": "unstuck.client.workflow",
    "current_context": "unstuck.runner.context",
    "step": "unstuck.runner.steps",
}


if not TYPE_CHECKING:  # Else a type checker would believe in every name.

    def __getattr__(name: str) -> Any:
        # Loaded on first use: a worker and its nursery import parts of this package and need not pay for all of it.
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module 'unstuck' has no attribute {name!r}")
        return getattr(import_module(_HOMES.get(name, "unstuck.domain.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
