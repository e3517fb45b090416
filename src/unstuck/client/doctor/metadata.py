"""Read what a worker wrote down of itself when it was born; others may have written anything, or nothing."""

from typing import TypeVar

from unstuck.store.records import WorkerRecord

T = TypeVar("T", bool, float, str)


def told(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give one of the settings that a worker lives by, or None where it did not say."""
    settings = worker.metadata.get("settings")
    return _as(settings.get(name), kind) if isinstance(settings, dict) else None


def noted(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give a fact that a worker noted beside its settings."""
    return _as(worker.metadata.get(name), kind)


def _as(value: object, kind: type[T]) -> T | None:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    return value if isinstance(value, kind) else None
