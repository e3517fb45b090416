"""Find tasks and queues by what workers told the ledger, for doors that do not have the app."""

from collections.abc import Iterable, Mapping

from unstuck.domain.errors import UnknownQueue, UnknownTask
from unstuck.domain.names import did_you_mean
from unstuck.store.contract import Ledger
from unstuck.store.records import TaskRecord

LISTED = 10


def known_tasks(ledger: Ledger) -> dict[str, TaskRecord]:
    """Give every task that a living or past worker knows, by name."""
    return {task.name: task for task in ledger.tasks()}


def known_task(tasks: Mapping[str, TaskRecord], name: str) -> TaskRecord:
    """Give the task of this name, or raise UnknownTask that lists those there are."""
    found = tasks.get(name)
    if found is not None:
        return found
    owner = "No worker has told the ledger of a task by that name; known are"
    listed = f" {owner}: {_first(tasks)}." if tasks else " No worker has told the ledger of any task yet."
    raise UnknownTask(
        f"There is no task {name!r}.{did_you_mean(name, tasks)}{listed} Start a worker that has the task."
    )


def check_queue(queue: str, known: Iterable[str]) -> None:
    """Raise UnknownQueue for a queue that nothing names: a job in it would wait in vain."""
    names = set(known)
    if queue not in names:
        raise UnknownQueue(
            f"There is no queue {queue!r}.{did_you_mean(queue, names)} Known: {_first(names)}. "
            "A queue comes to be with a task or a worker that names it."
        )


def _first(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:LISTED])
