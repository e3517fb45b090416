"""Unstuck: durable background jobs for Python that survive the death of their workers."""

from typing import TYPE_CHECKING, Any

from unstuck.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from unstuck.app import App as App
    from unstuck.client.job import Job as Job
    from unstuck.client.operator.stale import StaleAction as StaleAction
    from unstuck.client.task import Task as Task
    from unstuck.client.workflows import Group as Group
    from unstuck.client.workflows import Node as Node
    from unstuck.client.workflows import Workflow as Workflow
    from unstuck.client.workflows import WorkflowRun as WorkflowRun
    from unstuck.config import Recovery as Recovery
    from unstuck.config import Retention as Retention
    from unstuck.domain.events import Event as Event
    from unstuck.domain.events import EventKind as EventKind
    from unstuck.domain.node_inputs import NodeError as NodeError
    from unstuck.domain.retry import Retry as Retry
    from unstuck.domain.states import JobState as JobState
    from unstuck.errors import CallFailed as CallFailed
    from unstuck.errors import ClientClosed as ClientClosed
    from unstuck.errors import ConfigError as ConfigError
    from unstuck.errors import DeadlineExceeded as DeadlineExceeded
    from unstuck.errors import DuplicateJob as DuplicateJob
    from unstuck.errors import ErrorCode as ErrorCode
    from unstuck.errors import JobCancelled as JobCancelled
    from unstuck.errors import JobExpired as JobExpired
    from unstuck.errors import JobFailed as JobFailed
    from unstuck.errors import JobNotFound as JobNotFound
    from unstuck.errors import JobQuarantined as JobQuarantined
    from unstuck.errors import LedgerBusy as LedgerBusy
    from unstuck.errors import LedgerError as LedgerError
    from unstuck.errors import LedgerReplaced as LedgerReplaced
    from unstuck.errors import LedgerStandby as LedgerStandby
    from unstuck.errors import LedgerUnavailable as LedgerUnavailable
    from unstuck.errors import MigrationBlocked as MigrationBlocked
    from unstuck.errors import NameTaken as NameTaken
    from unstuck.errors import NoLedger as NoLedger
    from unstuck.errors import NoWorkers as NoWorkers
    from unstuck.errors import OutOfMemory as OutOfMemory
    from unstuck.errors import PayloadError as PayloadError
    from unstuck.errors import RefusedValue as RefusedValue
    from unstuck.errors import ReplyTimeout as ReplyTimeout
    from unstuck.errors import ResultNotAvailable as ResultNotAvailable
    from unstuck.errors import ResultNotStorable as ResultNotStorable
    from unstuck.errors import ResultTimeout as ResultTimeout
    from unstuck.errors import SchemaAhead as SchemaAhead
    from unstuck.errors import SchemaForked as SchemaForked
    from unstuck.errors import SchemaMismatch as SchemaMismatch
    from unstuck.errors import SignalRefused as SignalRefused
    from unstuck.errors import SignalTimeout as SignalTimeout
    from unstuck.errors import Stalled as Stalled
    from unstuck.errors import StepMismatch as StepMismatch
    from unstuck.errors import TaskFailed as TaskFailed
    from unstuck.errors import TooManySteps as TooManySteps
    from unstuck.errors import UncertainCommit as UncertainCommit
    from unstuck.errors import UnknownName as UnknownName
    from unstuck.errors import UnknownQueue as UnknownQueue
    from unstuck.errors import UnknownSchedule as UnknownSchedule
    from unstuck.errors import UnknownTask as UnknownTask
    from unstuck.errors import UnknownWorker as UnknownWorker
    from unstuck.errors import UnstuckError as UnstuckError
    from unstuck.errors import WorkerCrashed as WorkerCrashed
    from unstuck.errors import WorkflowNotFound as WorkflowNotFound
    from unstuck.errors import WrongArguments as WrongArguments
    from unstuck.runner.context import Context as Context
    from unstuck.runner.context import current_context as current_context
    from unstuck.runner.context import step as step
    from unstuck.runner.stop_signal import StopRequested as StopRequested

__all__ = [
    "App",
    "CallFailed",
    "ClientClosed",
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
    "Group": "unstuck.client.workflows",
    "Job": "unstuck.client.job",
    "JobState": "unstuck.domain.states",
    "Node": "unstuck.client.workflows",
    "NodeError": "unstuck.domain.node_inputs",
    "Recovery": "unstuck.config",
    "Retention": "unstuck.config",
    "Retry": "unstuck.domain.retry",
    "StaleAction": "unstuck.client.operator.stale",
    "StopRequested": "unstuck.runner.stop_signal",
    "Task": "unstuck.client.task",
    "Workflow": "unstuck.client.workflows",
    "WorkflowRun": "unstuck.client.workflows",
    "current_context": "unstuck.runner.context",
    "step": "unstuck.runner.context",
}


if not TYPE_CHECKING:  # Else a type checker would believe in every name.

    def __getattr__(name: str) -> Any:
        # Loaded on first use: a worker and its fork server import parts of this package and need not pay for all of it.
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module 'unstuck' has no attribute {name!r}")
        return getattr(import_module(_HOMES.get(name, "unstuck.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
