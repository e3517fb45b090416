"""An app that traces: every span that ends in its processes becomes a line of a file."""

import asyncio
import os

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from unstuck import App, Context, Retry

app = App()
tracer = trace.get_tracer("shop")


def _line(span: ReadableSpan) -> str:
    return span.to_json(indent=None).replace("\n", " ") + "\n"


def trace_into(path: str) -> None:
    """Set up the provider of this process; done once."""
    provider = TracerProvider()
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the process
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=_line)))
    trace.set_tracer_provider(provider)


if "TRACE_FILE" in os.environ:
    trace_into(os.environ["TRACE_FILE"])


@app.task(retry=Retry(max_attempts=2, backoff="constant", delay=0.05))
def charge(ctx: Context) -> int:
    with tracer.start_as_current_span("call the bank"):
        if ctx.attempt == 1:
            raise ValueError("the bank is closed")
    return ctx.attempt


@app.task
async def notify(name: str) -> str:
    with tracer.start_as_current_span(f"mail to {name}"):
        await asyncio.sleep(0.01)
    return name
