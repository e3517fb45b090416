"""A handle on one job: ask for its state, wait for its result, cancel it."""

import asyncio
import threading
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Generic, cast

from unstuck.client.runtime import ClientRuntime
from unstuck.domain.frames import is_packed, read_reply
from unstuck.domain.node_inputs import read_result
from unstuck.domain.payload import encode
from unstuck.domain.states import JobState
from unstuck.domain.units import Duration, brief, seconds
from unstuck.errors import JobNotFound, LedgerError, ResultTimeout, exception_for
from unstuck.ledger.contract.jobs import JobRecord, Outcome

if TYPE_CHECKING:
    # The type checker knows defaults of type variables on every Python: a bare `Job` stays a good annotation.
    from typing_extensions import TypeVar

    from unstuck.client.events import EventStream
    from unstuck.notify.results import Answer

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

EXPLAIN_S = 2.0
"""How long `result` looks for the reason after its timeout."""


class Job(Generic[R_co]):
    """A job, durable since the enqueue that gave this handle returned."""

    def __init__(self, runtime: ClientRuntime, job_id: int, *, fresh: bool = True, warning: str | None = None) -> None:
        self._runtime = runtime
        self.id = job_id
        self.fresh = fresh
        """False: an unfinished job with the same unique key was there already, and this is it."""
        self.warning = warning
        """Says that nobody would take it when it was enqueued; None where somebody would."""

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def record(self) -> JobRecord:
        """Give all that the ledger knows of the job now."""
        record = self._runtime.services().ledger.jobs.get(self.id)
        if record is None:
            raise JobNotFound(f"Job {self.id} does not exist: it was never stored, or was pruned after it ended.")
        return record

    @property
    def state(self) -> JobState:
        return self.record().state

    def events(self, kinds: Collection[str] = (), *, after: str | None = None) -> "EventStream":
        """Follow its life until it ends, with `for` or `async for`; `after` is the cursor of an earlier event."""
        from unstuck.client.events import follow

        return follow(self._runtime, self.id, kinds, after)

    def cancel(self) -> str:
        """Cancel it: 'cancelled', 'requested' (it runs, and its worker is told) or 'finished' (too late)."""
        return self._runtime.services().client_operator.jobs.cancel([self.id])[self.id]

    def signal(self, name: str, value: Any = None) -> str:
        """Send it a signal for `ctx.wait_signal(name)`, with a value (JSON): 'woken' (it waited for it) or 'kept'
        (until it does). SignalRefused when the job is over."""
        parts = self._runtime.services()
        data = encode(value, f"The value of signal {name!r}", self._runtime.settings.max_payload_bytes)
        return parts.client_operator.jobs.signal(self.id, name, data)

    def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end; give what the task returned, or raise what became of the job."""
        patience_s = None if timeout is None else seconds(timeout, "timeout")
        answers: list[Answer] = []
        told = threading.Event()

        def tell(answer: "Answer") -> None:
            answers.append(answer)
            told.set()

        watcher = self._runtime.services().watcher
        waiter = watcher.wait(self.id, tell)
        try:
            if not told.wait(patience_s):
                raise self._timeout(patience_s)
        finally:
            watcher.remove(waiter)
        return cast(R_co, self._value(answers[0]))

    async def result_async(self, timeout: Duration | None = None) -> R_co:  # noqa: ASYNC109 - the same name in both colours
        """Like `result`, without blocking the event loop."""
        patience_s = None if timeout is None else seconds(timeout, "timeout")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def tell(answer: "Answer") -> None:
            loop.call_soon_threadsafe(_fulfil, future, answer)

        parts = await asyncio.to_thread(self._runtime.services)
        waiter = parts.watcher.wait(self.id, tell)
        try:
            answer = await asyncio.wait_for(future, patience_s)
        except TimeoutError:
            raise await asyncio.to_thread(self._timeout, patience_s) from None
        finally:
            parts.watcher.remove(waiter)
        return cast(R_co, await asyncio.to_thread(self._value, answer) if _is_packed(answer) else self._value(answer))

    def _value(self, answer: "Answer") -> Any:
        if not isinstance(answer, Outcome):
            raise answer
        if answer.state is JobState.SUCCEEDED and answer.result is not None:
            if _is_packed(answer):
                return read_reply(answer.result, self.record().payload)
            return read_result(answer.result)
        error = answer.error
        assert error is not None, f"job {answer.job_id} ended as {answer.state} without an error"
        raise exception_for(error.code, error.message, job_id=answer.job_id, cause=error.cause, details=error.details)

    def _timeout(self, patience_s: float | None) -> ResultTimeout:
        """Return what the job does, unless that takes long: the caller's time is over, and the ledger may hang."""
        doing: Future[str] = Future()

        def look() -> None:
            try:
                doing.set_result(self._runtime.services().operator.doing(self.id))
            except LedgerError as error:
                doing.set_result(str(error))  # Patience ended all the same.
            except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
                doing.set_exception(error)

        threading.Thread(target=look, name="unstuck-explain", daemon=True).start()
        try:
            words = doing.result(EXPLAIN_S)
        except FutureTimeout:
            words = "The ledger does not say what it is doing. It may be away, or hang."
        return ResultTimeout(f"Job {self.id} did not end within {brief(patience_s or 0.0)}: {words}")


def _fulfil(future: "asyncio.Future[Answer]", answer: "Answer") -> None:
    if not future.done():
        future.set_result(answer)


def _is_packed(answer: "Answer") -> bool:
    """Say whether it came over ZeroMQ: what its frames mean depends on the request."""
    return isinstance(answer, Outcome) and answer.result is not None and is_packed(answer.result)
