"""Set the stage for one measurement: an empty ledger, an app on it in this process, workers in others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fleet import copy_tasks

from bench import tasks
from bench.databases import Database, temporary_folder
from bench.processes import Workers, workers_on
from unstuck import App, Task
from unstuck.config import DEFAULT_QUEUE
from unstuck.ledger.contract import Ledger


@dataclass
class Stage:
    database: Database
    url: str
    app: App
    workers: Workers
    folder: Path

    @property
    def ledger(self) -> Ledger:
        return self.app.ledger

    def task(self, name: str) -> Task[Any, Any]:
        return self.app.task_by_name(name)

    def pause(self) -> None:
        self.ledger.queues.pause(DEFAULT_QUEUE, "bench")

    def resume(self) -> None:
        self.ledger.queues.resume(DEFAULT_QUEUE, "bench")
        self.ledger.notify({f"queue:{DEFAULT_QUEUE}"})


@contextmanager
def stage_on(database: Database, **settings: Any) -> Iterator[Stage]:
    """Open a fresh ledger with the tasks of the benchmark; everything is gone afterwards."""
    url = database.fresh()
    app = App(url, **settings)
    copy_tasks(tasks.app, app)
    try:
        with temporary_folder() as folder, workers_on(url, app.ledger, folder) as workers:
            yield Stage(database, url, app, workers, folder)
    finally:
        app.close()
        database.drop(url)
