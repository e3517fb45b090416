"""The app that the demo's workers run: six kinds of small work, each leaving a record outside the ledger."""

import asyncio
import os
import random
import secrets
import time

from unstuck import App, Context, Retry

QUEUE = "demo"
RECORD_VARIABLE = "UNSTUCK_DEMO_RECORD"
MANY = 100
"""Crash retries that no demo uses up: here the killer is to blame, never the job."""

# One beat a second instead of one in five: a heart that can be watched.
app = App(heartbeat_interval="1s")


def record(*words: object) -> None:
    """Append one line in one write: it is there whole or not at all, whoever is killed when."""
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{' '.join(map(str, words))}\n".encode())
    finally:
        os.close(fd)


class _Proof:
    """Says when one try began and ended; `mark` is returned as the result and stands in the record too."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.mark = secrets.token_hex(8)
        record("begun", ctx.job_id, self.mark, f"{time.time():.6f}")

    def done(self) -> str:
        record("ended", self.ctx.job_id, self.mark, f"{time.time():.6f}")
        return self.mark


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def resize(ctx: Context, picture: int) -> str:
    """Quick work, over before one can look."""
    proof = _Proof(ctx)
    time.sleep(random.uniform(0.005, 0.05))
    print(f"picture {picture}: 64x64")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
async def fetch(ctx: Context, page: int) -> str:
    """Async work: many at once on one event loop."""
    proof = _Proof(ctx)
    print(f"page {page}: asking")
    await asyncio.sleep(random.uniform(0.2, 1.5))
    print(f"page {page}: 200 OK")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def report(ctx: Context, chapters: int) -> str:
    """Long work: the likeliest to be hit."""
    proof = _Proof(ctx)
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
    proof = _Proof(ctx)
    time.sleep(random.uniform(0.02, 0.1))
    if ctx.attempt - ctx.crash_count <= refusals:
        raise ConnectionRefusedError("421 too busy, try again later")
    print("250 accepted")
    return proof.done()


@app.task(queue=QUEUE, on_crash="fail")
def charge(ctx: Context, cents: int) -> str:
    """Work that must not be done twice: if its process dies, a person decides."""
    proof = _Proof(ctx)
    time.sleep(random.uniform(0.3, 0.9))
    print(f"charged {cents} cents")
    return proof.done()


@app.task(queue=QUEUE, on_crash="retry", max_crash_retries=MANY)
def parse(ctx: Context, text: str) -> str:
    """Work that cannot succeed: it ends as failed, with the reason."""
    proof = _Proof(ctx)
    int(text)
    return proof.done()
