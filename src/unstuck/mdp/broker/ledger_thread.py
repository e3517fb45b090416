"""The thread that talks to the ledger for the broker: one batch after the other, retried through outages."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from unstuck.errors import LedgerBusy, LedgerError, RefusedValue, UnstuckError
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.logs import logger
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.batch_runner import BatchRunner
from unstuck.mdp.broker.exchange_parts import Step

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0
LONGEST_BUSY_S = 0.5
"""Longest pause if a lock of another session is in the way: heartbeats are sent in between."""

log = logger("unstuck.mdp.broker")


class LedgerThread:
    """`tell` is called with each answer, `fail` with an error that nobody foresaw; both from the clerk's thread."""

    def __init__(
        self,
        batch_runner: BatchRunner,
        tell: Callable[[BatchResult], None],
        fail: Callable[[BaseException], None],
        metrics_writer: MetricsWriter | None = None,
    ) -> None:
        self._batch_runner = batch_runner
        self._tell = tell
        self._fail = fail
        self._metrics_writer = metrics_writer
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-broker-ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, batch: Batch) -> None:
        self._batches.put(batch)

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._batches.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                answer = self._do(batch)
                if answer is None:
                    return
                self._tell(answer)
                if self._metrics_writer is not None:
                    self._metrics_writer.tend()
        except BaseException as error:  # noqa: BLE001 - without a clerk the broker would take requests and do nothing
            self._fail(error)

    def _do(self, batch: Batch) -> BatchResult | None:
        """Do it, however long the ledger is away; None when we must end before."""
        retry_s = FIRST_RETRY_S
        answer = BatchResult()
        steps = deque(self._batch_runner.steps(batch, answer))
        while steps:
            try:
                _advance(steps)
                retry_s = FIRST_RETRY_S
            except (UnstuckError, OSError) as error:
                if self._stopping.is_set():
                    log.warning("The last order could not be written", error=str(error))
                    return None
                if retry_s == FIRST_RETRY_S or not isinstance(error, LedgerError):
                    log.warning("The ledger cannot be used; trying again", error=str(error))
                if isinstance(error, LedgerBusy):
                    with suppress(LedgerError):
                        self._batch_runner.beat_on()
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_BUSY_S if isinstance(error, LedgerBusy) else LONGEST_RETRY_S)
        return answer


def _advance(steps: deque[Step]) -> None:
    """Do the first step, or put smaller ones in its place if a lock or a value of it is in the way."""
    smaller: Sequence[Step] = ()
    try:
        steps[0].do()
    except (LedgerBusy, RefusedValue) as error:
        instead = steps[0].instead(error)
        if instead is None:
            raise
        smaller = instead
    steps.popleft()
    steps.extendleft(reversed(smaller))
