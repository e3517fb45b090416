"""The app that the demo's workers run. Each task leaves a record outside the ledger."""

# ruff: noqa: T201 - tasks print: what they say is kept with the attempt
import asyncio
import math
import random
import threading
import time

from unstuck import App, Context, Recovery, Retry
from unstuck.client.job import Job
from unstuck.demo.record import Proof
from unstuck.errors import LedgerError

QUEUE = "demo"
MANY = 100
"""Crash retries that no demo uses up: here the killer is to blame, never the job."""

# One beat a second instead of one in five: a heart that can be watched.
app = App(recovery=Recovery(heartbeat_interval="1s"))


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


JOBS_PER_WORKER_S = 8.0
WAVE_S = 9.0
STEP_S = 0.1
JOIN_S = 30.0

_SHARES = {"resize": 46, "fetch": 32, "mail": 8, "charge": 7, "report": 6, "parse": 1}


class JobStream:
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
            return report.enqueue(random.randint(3, 6))
        case "mail":
            return mail.enqueue(random.choice((0, 1, 1, 2)))
        case "charge":
            return charge.enqueue(random.randint(100, 9_999))
        case "parse":
            return parse.enqueue("twelve")
        case "fetch":
            return fetch.enqueue(random.randint(1, 999))
        case _:
            return resize.enqueue(random.randint(1, 999))
