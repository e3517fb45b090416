"""Trace jobs with OpenTelemetry, from the enqueue through every attempt, where the program uses it.

Nothing is imported here: a program that has not imported `opentelemetry` itself cannot have set up anything that would
record a span, and pays one look into a dict. The context of the enqueue travels with the arguments of the job.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from unstuck.version import VERSION

TRACER = "unstuck"
FLUSH_MS = 2_000
MAX_TRACE_CHARS = 512

Attributes = Mapping[str, str | int]


def is_used() -> bool:
    return "opentelemetry.trace" in sys.modules


class EnqueueSpan:
    """The span of an enqueue; `trace` is what its jobs carry."""

    def __init__(self, span: Any = None, trace: str = "") -> None:
        self._span = span
        self.trace = trace

    def stored(self, job_ids: list[int]) -> None:
        if self._span is not None and len(job_ids) == 1:
            self._span.set_attribute("unstuck.job.id", job_ids[0])
            self._span.set_attribute("messaging.message.id", str(job_ids[0]))


_NOT_TRACED = EnqueueSpan()


@contextmanager
def enqueue_span(task: str, queue: str, count: int) -> Iterator[EnqueueSpan]:
    """Span an enqueue of `count` jobs; where nobody traces, this is nothing."""
    if not is_used():
        yield _NOT_TRACED
        return
    from opentelemetry import trace

    attributes: Attributes = {
        **_common(task, queue),
        "messaging.operation.type": "send",
        "messaging.batch.message_count": count,
    }
    tracer = trace.get_tracer(TRACER, VERSION)
    with tracer.start_as_current_span(f"send {task}", kind=trace.SpanKind.PRODUCER, attributes=attributes) as span:
        yield EnqueueSpan(span, _carried())


class AttemptSpan:
    """The span of one attempt, in a runner. Whatever goes wrong with it is no trouble of the job."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def enter(self) -> None:
        """Make it the current one of this context, for good: the context ends with the attempt."""
        from opentelemetry import context, trace

        with suppress(Exception):
            context.attach(trace.set_span_in_context(self._span))

    def end(self, outcome: str, words: tuple[str, str, str] | None) -> None:
        """Close it; `words` are type, message and traceback of what was raised."""
        from opentelemetry.trace import StatusCode

        with suppress(Exception):
            self._span.set_attribute("unstuck.outcome", outcome)
            if words is not None:
                kind, message, traceback = words
                self._span.set_status(StatusCode.ERROR, message or kind)
                told = {"exception.type": kind, "exception.message": message, "exception.stacktrace": traceback}
                self._span.add_event("exception", {name: text for name, text in told.items() if text})
            self._span.end()


def attempt_span(task: str, queue: str, trace_context: str, facts: Attributes) -> AttemptSpan | None:
    """Begin the span of an attempt below the span of its enqueue; None where nobody traces."""
    if not is_used():
        return None
    from opentelemetry import trace

    with suppress(Exception):
        span = trace.get_tracer(TRACER, VERSION).start_span(
            f"process {task}",
            context=_extracted(trace_context),
            kind=trace.SpanKind.CONSUMER,
            attributes={**_common(task, queue), "messaging.operation.type": "process", **facts},
        )
        return AttemptSpan(span)
    return None


def flush() -> None:
    """Have what ended exported before this process ends, within a limit; a provider that cannot is left alone."""
    if is_used():
        from opentelemetry import trace

        force_flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if force_flush is not None:
            with suppress(Exception):
                force_flush(FLUSH_MS)


def _common(task: str, queue: str) -> dict[str, str]:
    return {
        "messaging.system": "unstuck",
        "messaging.destination.name": queue,
        "unstuck.task": task,
        "unstuck.queue": queue,
    }


def _carried() -> str:
    """Give the current context in W3C form: the parent, and the state after a line break where there is one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    text = "\n".join(carrier[name] for name in ("traceparent", "tracestate") if name in carrier)
    return text if len(text) <= MAX_TRACE_CHARS else text.partition("\n")[0]


def _extracted(text: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent, _, state = text.partition("\n")
    carrier = {"traceparent": parent, **({"tracestate": state} if state else {})} if parent else {}
    # Below its enqueue or alone, and never below whatever this process was in before.
    return TraceContextTextMapPropagator().extract(carrier, context=Context())
