"""An app whose jobs are followed by others, for workers that are killed."""

import os
import signal
import time
from typing import Any

from unstuck import App, Retry

app = App(queues=["hooks", "work"])


def _note(words: str) -> None:
    with open(os.environ["NOTES_TO"], "a", encoding="utf-8") as file:
        file.write(f"{words}\n")


@app.task(queue="hooks", on_crash="retry")
def note(event: dict[str, Any]) -> None:
    _note(f"{event['kind']} {event['job_id']} {event['state']} {event['code']}")


@app.task(queue="work", after_success=note, after_failure=note, after_crash=note, after_retry=note)
def nap(seconds: float) -> None:
    _note("begun")
    time.sleep(seconds)


@app.task(queue="work", on_crash="retry", max_crash_retries=1, after_failure=note, after_crash=note, after_retry=note)
def poison() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(queue="work", retry=Retry(max_attempts=2, delay="10ms"), after_failure=note, after_retry=note)
def fail() -> None:
    raise ValueError("no")
