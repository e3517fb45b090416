"""The app that the demo's workers run: six kinds of small work, each leaving a record outside the ledger."""

# ruff: noqa: T201 - tasks print: what they say is kept with the attempt

import asyncio
import random
import time

from unstuck import App, Context, Retry
from unstuck.cli.demo_record import Proof

QUEUE = "demo"
MANY = 100
"""Crash retries that no demo uses up: here the killer is to blame, never the job."""

# One beat a second instead of one in five: a heart that can be watched.
app = App(heartbeat_interval="1s")


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def resize(ctx: Context, picture: int) -> str:
    """Quick work, over before one can look."""
    proof = Proof(ctx.job_id)
    time.sleep(random.uniform(0.005, 0.05))
    print(f"picture {picture}: 64x64")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
async def fetch(ctx: Context, page: int) -> str:
    """Async work: many at once on one event loop."""
    proof = Proof(ctx.job_id)
    print(f"page {page}: asking")
    await asyncio.sleep(random.uniform(0.2, 1.5))
    print(f"page {page}: 200 OK")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def report(ctx: Context, chapters: int) -> str:
    """Long work: the likeliest to be hit."""
    proof = Proof(ctx.job_id)
    for chapter in range(1, chapters + 1):
        time.sleep(random.uniform(0.4, 0.8))
        print(f"chapter {chapter} of {chapters}")
    return proof.done()


@app.task(
    queue=QUEUE,
    on_crash="retry",
    max_crash_retries=MANY,
    retry=Retry(max_attempts=4, backoff="constant", delay="300ms"),
)
def mail(ctx: Context, refusals: int) -> str:
    """Work that fails at first: the server refuses so many times before it accepts."""
    proof = Proof(ctx.job_id)
    time.sleep(random.uniform(0.02, 0.1))
    if ctx.attempt - ctx.crash_count <= refusals:
        raise ConnectionRefusedError("421 too busy, try again later")
    print("250 accepted")
    return proof.done()


@app.task(queue=QUEUE, on_crash="fail")
def charge(ctx: Context, cents: int) -> str:
    """Work that must not be done twice: if its process dies, a person decides."""
    proof = Proof(ctx.job_id)
    time.sleep(random.uniform(0.5, 1.5))
    print(f"charged {cents} cents")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def parse(ctx: Context, text: str) -> str:
    """Work that cannot succeed: it ends as failed, with the reason."""
    proof = Proof(ctx.job_id)
    int(text)
    return proof.done()
