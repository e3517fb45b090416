"""An app for workers beside a user's open transaction: schedules with and without a unique key, and a keyed task."""

import time
from pathlib import Path

from unstuck import App, Context

app = App()


@app.schedule(every="1s", name="plain")
@app.schedule(every="1s", name="keyed", unique_key="held")
@app.task
def tick(ctx: Context) -> str:
    return "" if ctx.scheduled_for is None else ctx.scheduled_for.isoformat()


@app.task
def nap(seconds: float, notes: str) -> str:
    Path(notes).write_text("begun")
    time.sleep(seconds)
    return "slept"


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task(concurrency_key="customer:{customer}")
def serve(customer: str, seconds: float) -> str:
    time.sleep(seconds)
    return customer


@app.task(timeout="1m")
def hand_on(ctx: Context, key: str) -> str:
    """Succeed with a job to follow whose unique key somebody may hold."""
    ctx.enqueue(add.options(unique_key=key), 1, 2)
    return "handed on"
