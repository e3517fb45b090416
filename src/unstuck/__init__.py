"""Unstuck: durable background jobs for Python that survive the death of their workers."""

from typing import TYPE_CHECKING, Any

from unstuck.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from unstuck.app import App as App
    from unstuck.client.job import Job as Job
    from unstuck.client.task import Task as Task
    from unstuck.config import Recovery as Recovery
    from unstuck.config import Retention as Retention
    from unstuck.domain.errors import *  # noqa: F403
    from unstuck.domain.retry import Retry as Retry
    from unstuck.runner.context import Context as Context
    from unstuck.runner.context import current_context as current_context

_HOMES = {
    "App": "unstuck.app",
    "Job": "unstuck.client.job",
    "Task": "unstuck.client.task",
    "Recovery": "unstuck.config",
    "Retention": "unstuck.config",
    "Retry": "unstuck.domain.retry",
    "Context": "unstuck.runner.context",
    "current_context": "unstuck.runner.context",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a worker and its nursery import parts of this package and need not pay for all of it.
    from importlib import import_module

    home = _HOMES.get(name)
    if home is not None:
        return getattr(import_module(home), name)
    errors = import_module("unstuck.domain.errors")
    if not name.startswith("_") and hasattr(errors, name):
        return getattr(errors, name)
    raise AttributeError(f"module 'unstuck' has no attribute {name!r}")
