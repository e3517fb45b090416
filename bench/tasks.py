"""The app that benchmarks run in real workers. Settings come from UNSTUCK_* and BENCH_RECOVERY in the environment."""

import json
import os
import time
from pathlib import Path
from typing import Any

from unstuck import App, Context, Recovery


def _recovery() -> Recovery | None:
    # UNSTUCK_EVIDENCE cannot say "no evidence at all": an empty variable counts as not set.
    text = os.environ.get("BENCH_RECOVERY", "")
    values: dict[str, Any] = json.loads(text) if text else {}
    if "evidence" in values:
        values["evidence"] = tuple(values["evidence"])
    return Recovery(**values) if values else None


app = App(recovery=_recovery())


@app.task
def noop() -> None:
    """End at once; a crash would fail it, so it never runs ahead."""


@app.task(timeout="1h", stall_timeout="10m", interpreter_timeout="10m", memory_limit="1GB")
def noop_limited() -> None:
    """The same, with every limit that there is."""


@app.task(timeout="1h", stall_timeout="1m", interpreter_timeout="1m", memory_limit="1GB")
def watched_nap(ctx: Context, seconds: float) -> None:
    """Sleep under every limit, with a heartbeat a second."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        ctx.heartbeat()
        time.sleep(1.0)


@app.task(on_crash="retry")
def noop_retry() -> None:
    """End at once; a crash would retry it, so runners may be given several ahead."""


@app.task
async def noop_async() -> None:
    pass


@app.task(on_crash="retry")
async def noop_async_retry() -> None:
    pass


@app.task
def first_line() -> float:
    """Say when user code began, on a clock that every process of this host shares."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@app.task
async def first_line_async() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@app.task
def hold(path: str) -> None:
    """Say which process this is, then stay until killed."""
    note = Path(path)
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    time.sleep(600)
