"""Read what a worker wrote down of itself when it was born; others may have written anything, or nothing.

What foreign workers write is their own: the same words need not mean the same."""

from typing import Any, TypeVar

from unstuck.domain.states import Door
from unstuck.store.records import WorkerRecord

T = TypeVar("T", bool, float, str)


def told(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give one of the settings that a worker lives by, or None where it did not say."""
    settings = own(worker).get("settings")
    return _as(settings.get(name), kind) if isinstance(settings, dict) else None


def noted(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give a fact that a worker noted beside its settings."""
    return _as(own(worker).get(name), kind)


def own(worker: WorkerRecord) -> dict[str, Any]:
    """Give the metadata of one of our own workers, nothing of a foreign one."""
    return worker.metadata if worker.door is Door.PYTHON else {}


def _as(value: object, kind: type[T]) -> T | None:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    return value if isinstance(value, kind) else None
