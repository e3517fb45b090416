"""Enqueue the demo's stream of jobs: a mixture that swells and ebbs."""

import math
import random
import threading
import time

from unstuck.cli import demo_tasks as tasks
from unstuck.client.job import Job
from unstuck.domain.errors import LedgerError

JOBS_PER_WORKER_S = 8.0
WAVE_S = 9.0
STEP_S = 0.1
JOIN_S = 30.0

_SHARES = {"resize": 46, "fetch": 32, "mail": 8, "charge": 7, "report": 6, "parse": 1}


class Stream:
    """A thread that enqueues until it is stopped; `ids` are the jobs that were durably accepted."""

    def __init__(self, workers: int) -> None:
        self.ids: list[int] = []
        self.trouble: str | None = None
        self._rate_s = workers * JOBS_PER_WORKER_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flow, name="demo-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the enqueue that is on its way: its job counts."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _flow(self) -> None:
        began_s = time.monotonic()
        owed = 0.0
        while not self._stop.wait(STEP_S):
            wave = 1.0 + 0.7 * math.sin((time.monotonic() - began_s) * math.tau / WAVE_S)
            owed += self._rate_s * wave * STEP_S
            while owed >= 1.0 and not self._stop.is_set():
                owed -= 1.0
                try:
                    self.ids.append(_one().id)
                except LedgerError as error:
                    # What was not accepted is not enqueued, and so cannot be lost; but people want to know.
                    self.trouble = str(error)


def _one() -> Job:
    kind = random.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
    match kind:
        case "report":
            return tasks.report.enqueue(random.randint(3, 6))
        case "mail":
            return tasks.mail.enqueue(random.choice((0, 1, 1, 2)))
        case "charge":
            return tasks.charge.enqueue(random.randint(100, 9_999))
        case "parse":
            return tasks.parse.enqueue("twelve")
        case "fetch":
            return tasks.fetch.enqueue(random.randint(1, 999))
        case _:
            return tasks.resize.enqueue(random.randint(1, 999))
