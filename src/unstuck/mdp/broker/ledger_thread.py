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
"""Longest pause if another session holds a lock. Heartbeats are sent in between."""

log = logger("unstuck.mdp.broker")


class LedgerThread:
    """`on_result` is called with each result, `on_error` with an unexpected error; both from this thread."""

    def __init__(
        self,
        batch_runner: BatchRunner,
        on_result: Callable[[BatchResult], None],
        on_error: Callable[[BaseException], None],
        metrics_writer: MetricsWriter | None = None,
    ) -> None:
        self._batch_runner = batch_runner
        self._on_result = on_result
        self._on_error = on_error
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
                result = self._do(batch)
                if result is None:
                    return
                self._on_result(result)
                if self._metrics_writer is not None:
                    self._metrics_writer.tend()
        except BaseException as error:  # noqa: BLE001 - without this thread the broker would accept requests and do nothing
            self._on_error(error)

    def _do(self, batch: Batch) -> BatchResult | None:
        """Return the result of a batch, however long the ledger is away. None: the broker stops before that."""
        retry_s = FIRST_RETRY_S
        result = BatchResult()
        steps = deque(self._batch_runner.steps(batch, result))
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
                        self._batch_runner.send_heartbeats()
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_BUSY_S if isinstance(error, LedgerBusy) else LONGEST_RETRY_S)
        return result


def _advance(steps: deque[Step]) -> None:
    """Do the first step, or replace it by smaller ones if a lock or a value is in its way."""
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
