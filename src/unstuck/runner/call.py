"""Call the user's code for a job message and report what came of it, with tracebacks that leave our frames out."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from unstuck.domain import frames
from unstuck.domain.endings import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, storable_text
from unstuck.domain.frames import FRAMES
from unstuck.domain.node_inputs import ALL, unpack_inputs
from unstuck.domain.payload import JSON, encode_result, put_results, read_call
from unstuck.domain.payload import Call as Arguments
from unstuck.domain.text import did_you_mean
from unstuck.errors import PayloadError
from unstuck.runner.context import Context
from unstuck.runner.journal import Journals
from unstuck.runner.messages import CANCELLED, NOT_STORABLE, RAISED, SUCCEEDED, SUSPENDED, JobMessage, Kind, Report
from unstuck.runner.tasks import TaskDefinition
from unstuck.tracing import AttemptSpan, attempt_span, is_used

_ROOM = str(Path(__file__).parent)
_HOUSE = str(Path(__file__).parent.parent)


def user_traceback(error: BaseException) -> str:
    """Give the traceback from the first frame that is not ours or the import machinery's."""
    trace = error.__traceback__
    while trace is not None and _ours(trace):
        trace = trace.tb_next
    try:
        return "".join(traceback.TracebackException(type(error), error, trace).format()).rstrip()
    except BaseException as second:  # noqa: BLE001 - an exception that cannot be written must not end the runner
        lines = "".join(traceback.format_tb(trace))
        return f"{lines}{type_name(error)}: (cannot be written: {type_name(second)})"


def user_place(error: BaseException) -> str:
    """Give "file.py, line 7: " for the innermost line of user code that led to an error of ours."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_HOUSE, "<"))
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def message_of(error: BaseException) -> str:
    """Give `str(error)`, or say that it has none."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - as above
        return f"(its message cannot be written: {type_name(second)})"


def type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith((_ROOM, "<frozen importlib")) or name == importlib.__file__


MAX_TYPE_CHARS = 500


class CannotCall(Exception):
    """The job cannot be turned into a call; the message says why and what to do."""


class Call(msgspec.Struct, gc=False):
    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    context: Context
    trace: str = ""
    """Where its enqueue stands in a trace."""

    def span(self) -> AttemptSpan | None:
        """Begin the span of this attempt; None where nobody traces."""
        if not is_used():
            return None
        facts = self.context
        return attempt_span(
            facts.task,
            facts.queue,
            self.trace,
            {
                "unstuck.job.id": facts.job_id,
                "messaging.message.id": str(facts.job_id),
                "unstuck.attempt": facts.attempt,
                "unstuck.crashes": facts.crash_count,
                "unstuck.worker.id": facts.worker_id,
            },
        )


@dataclass(frozen=True)
class _Callee:
    definition: TaskDefinition
    context_at: int | None
    """Position of the parameter that wants the Context; None when it must be given by name."""
    takes_own_id: bool
    """It has a parameter for what a client over ZeroMQ calls its job."""


class Caller:
    """Turn job messages into calls of the app's tasks, within the limits of this runner."""

    def __init__(
        self,
        tasks: Mapping[str, TaskDefinition],
        kind: Kind,
        worker_id: str,
        max_payload_bytes: int,
        journals: Journals | None = None,
    ) -> None:
        self._tasks = tasks
        self._kind = kind
        self._worker_id = worker_id
        self._limit_bytes = max_payload_bytes
        self._journals = journals
        self._callees: dict[str, _Callee] = {}

    def prepare(self, frame: JobMessage) -> Call:
        """Give the call that a frame asks for, or raise CannotCall."""
        callee = self._callees.get(frame.task)
        if callee is None:
            callee = self._callees[frame.task] = self._find(frame.task)
        try:
            given = self._arguments(frame, callee)
        except PayloadError as error:
            raise CannotCall(f"The arguments of job {frame.job_id} cannot be read: {error}.") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CannotCall(
                f"The arguments of job {frame.job_id} cannot be read: {error}. Enqueue it again, with a JSON object "
                "of 'args' (a list) and 'kwargs' (an object)."
            ) from error
        except (KeyError, IndexError, TypeError) as error:
            raise CannotCall(
                f"The arguments of job {frame.job_id} want the result of a node that is not there ({error}): its "
                "workflow was changed by hand, or this worker is older than it. Start the workflow again."
            ) from error
        except MemoryError as error:
            raise CannotCall(
                f"The arguments of job {frame.job_id} cannot be read: they need more memory than this process may "
                f"have ({len(frame.payload):,} bytes of JSON). Store the data elsewhere and pass a reference."
            ) from error
        if self._journals is not None:
            self._journals.expect(frame)
        context = Context(
            frame.job_id,
            frame.task,
            frame.queue,
            frame.attempt,
            frame.crashes,
            self._worker_id,
            frame.token,
            None if given.scheduled_for is None else datetime.fromtimestamp(given.scheduled_for, UTC),
        )
        name = callee.definition.context_parameter
        if name is not None:
            position = callee.context_at
            if position is not None and position <= len(given.args):
                given.args.insert(position, context)
            else:
                given.kwargs[name] = context
        return Call(callee.definition.function, given.args, given.kwargs, context, given.trace)

    def succeeded(self, frame: JobMessage, value: Any) -> Report:
        """Report a returned value, or that it cannot be stored."""
        if value is None and frame.payload_type == JSON:
            return Report(frame.token, SUCCEEDED, b"null")
        try:
            written = encode_result(value, frame.task, self._limit_bytes)
            if frame.payload_type == FRAMES:
                written = frames.reply(value, written, frame.payload)
            return Report(frame.token, SUCCEEDED, written)
        except PayloadError as error:
            reason = _unfinished(value, frame.task) or str(error)
        except BaseException as error:  # noqa: BLE001 - a value may run any code while it is written
            reason = f"The result of {frame.task!r} cannot be written as JSON: {type_name(error)}: {message_of(error)}"
        return Report(frame.token, NOT_STORABLE, words=(storable_text(reason, MAX_MESSAGE_CHARS), "", ""))

    def ended(self, report: Report, error: BaseException | None) -> Report:
        """Give the report that is right for what the attempt wrote down on its way."""
        return report if self._journals is None else self._journals.close(report.token, report, error, raised)

    def _arguments(self, frame: JobMessage, callee: _Callee) -> Arguments:
        if frame.payload_type == JSON:
            call = read_call(frame.payload)
            if call.refs:
                results = unpack_inputs(frame.inputs)
                if ALL in results:
                    raise CannotCall(f"Job {frame.job_id} cannot begin: {results[ALL].cause}.")
                put_results(call, results)
            return call
        if frame.payload_type != FRAMES:
            raise CannotCall(
                f"The arguments of job {frame.job_id} are {frame.payload_type!r}, which Python tasks cannot read. "
                f"Enqueue them as {JSON!r}."
            )
        named = frames.arguments(frame.payload)
        if not callee.takes_own_id:
            # It stands among the parameters, and is meant for the broker.
            named.pop(frames.OWN_ID, None)
        return Arguments(kwargs=named)

    def _find(self, task: str) -> _Callee:
        definition = self._tasks.get(task)
        if definition is None:
            raise CannotCall(
                f"This app has no task {task!r}.{did_you_mean(task, self._tasks)} Deploy the code that has it, "
                "or cancel the job."
            )
        if definition.is_async != (self._kind == "async"):
            raise CannotCall(
                f"Task {task!r} is {'async' if definition.is_async else 'sync'} and came to a runner for {self._kind} "
                "tasks. Restart the worker: it started with other code."
            )
        return _Callee(definition, _position(definition), _takes(definition, frames.OWN_ID))


OUTCOMES = {
    SUCCEEDED: "succeeded",
    RAISED: "raised",
    NOT_STORABLE: "not_storable",
    CANCELLED: "cancelled",
    SUSPENDED: "suspended",
}


def end_span(span: AttemptSpan, report: Report) -> None:
    span.end(OUTCOMES[report.kind], report.words)


def raised(token: int, error: BaseException) -> Report:
    """Report what user code raised, bounded and printable whatever the exception does."""
    return Report(
        token,
        RAISED,
        words=(
            storable_text(type_name(error), MAX_TYPE_CHARS),
            storable_text(message_of(error), MAX_MESSAGE_CHARS),
            storable_text(user_traceback(error), MAX_TRACEBACK_CHARS),
        ),
    )


def refused(token: int, error: CannotCall) -> Report:
    """Report a job that could not be called; there is no traceback of user code to show."""
    return Report(token, RAISED, words=("CannotCall", storable_text(str(error), MAX_MESSAGE_CHARS), ""))


def _unfinished(value: Any, task: str) -> str:
    """Explain a result that is code which has not run yet; return an empty text for any other."""
    if inspect.iscoroutine(value):
        value.close()
        return (
            f"Task {task!r} returned a coroutine that was not awaited. Register an `async def`, or have the decorator "
            "around it be one: `async def wrapper(…): return await function(…)`."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return f"Task {task!r} returned a generator, and a job has one result. Return a list of its values."
    return ""


def _position(definition: TaskDefinition) -> int | None:
    if definition.context_parameter is None:
        return None
    try:
        parameters = list(inspect.signature(definition.function).parameters.values())
    except (TypeError, ValueError):
        return None
    for position, parameter in enumerate(parameters):
        if parameter.name == definition.context_parameter:
            return None if parameter.kind is inspect.Parameter.KEYWORD_ONLY else position
    return None


def _takes(definition: TaskDefinition, name: str) -> bool:
    try:
        parameters = inspect.signature(definition.function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
