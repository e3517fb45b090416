"""Every reader of foreign bytes and texts, by name: what the tests and the fuzzer try to break."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from unstuck.client import views
from unstuck.domain import meaning
from unstuck.domain.bounded import Bounds
from unstuck.domain.bounded_cbor import decode_cbor
from unstuck.domain.bounded_json import decode_json
from unstuck.domain.cursor import read_cursor
from unstuck.domain.durations import seconds
from unstuck.domain.envelope import FRAMES, pack, read_fields, read_json_fields, read_object, read_value, unpack
from unstuck.domain.errors import ConfigError, PayloadError
from unstuck.domain.limits import read_rate
from unstuck.domain.names import checked_name, did_you_mean, printable
from unstuck.domain.order import Order
from unstuck.domain.payload import JSON
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.sizes import size_bytes
from unstuck.domain.ticking import checked_timing
from unstuck.http.foreign.seats import checked_metadata
from unstuck.http.guard import sessions
from unstuck.http.guard.bodies import FORM, MAX_FORM_BYTES, form_field
from unstuck.http.guard.hosts import read_host
from unstuck.http.models.jobs import NewJobBody
from unstuck.http.page import flash
from unstuck.http.problems import Problem
from unstuck.mdp import frames
from unstuck.mdp.bodies import map_of
from unstuck.mdp.broker.addresses import read_address
from unstuck.mdp.broker.calls import read_calls
from unstuck.mdp.broker.results import json_of, raised_in
from unstuck.mdp.conversation import Conversation
from unstuck.mdp.frames import Request as MdpRequest
from unstuck.mdp.frames import read
from unstuck.store.records import TaskRecord

REFUSALS = (PayloadError, ConfigError, Problem, ValidationError, ValueError)
"""What a reader may raise. Anything else would be an internal error of whoever called it."""
REDACT = Redactor(())

BOUNDS = Bounds(8 * 1024 * 1024, setting="web.max_body_bytes")
_KEYED = Policy(order=Order(key="of:{a}", parameters=("a",)))
_TASKS = {"sum": TaskRecord("sum", "sum", encode_policy(_KEYED))}

STORED: dict[str, Callable[[bytes], object]] = {
    "JSON": lambda data: decode_json(data, BOUNDS),
    "CBOR": lambda data: decode_cbor(data, BOUNDS),
    "a heartbeat over HTTP": lambda data: checked_metadata(decode_json(data, BOUNDS, type=dict[str, Any])),
    "a request at the broker": lambda data: read_calls(MdpRequest(b"sum", (data,)), _TASKS, 3, "mdp"),
    "options at the broker": lambda data: read_calls(MdpRequest(b"sum", (data, b"\xa0"), data[:2_000]), {}, 3, "mdp"),
    "a reply at the broker": lambda data: json_of([data]),
    "an error at the broker": raised_in,
    "arguments of a task": lambda data: meaning.arguments(pack([data])),
    "options and arguments": lambda data: meaning.arguments(pack([b"\xa0", data])),
    "some arguments": lambda data: meaning.named_arguments(pack([data]), {"a"}),
    "a shown call": lambda data: views.call_view(pack([data]), FRAMES),
    "a shown call of several frames": lambda data: meaning.show_call(pack([data[: len(data) // 2], data[-9:], data])),
    "a shown reply": lambda data: meaning.show_reply(pack([data]), pack([b"\xa0"])),
    "a reply": lambda data: meaning.read_reply(pack([data]), pack([b"\xa0"])),
    "a shown value": lambda data: REDACT(views.value_view(data, JSON)),
    "shown arguments": lambda data: REDACT(views.call_view(data, JSON)[1]),
    "what a frame means": read_value,
    "packed frames": unpack,
    "a map of a client": map_of,
    "an object": read_object,
    "entries of a map": lambda data: read_fields(data, {"a"}),
    "entries of an object": lambda data: read_json_fields(data, {"a"}),
}

TEXTS: dict[str, Callable[[str], object]] = {
    "a duration": lambda text: seconds(text, "timeout"),
    "a size": lambda text: size_bytes(text, "size"),
    "a rate": read_rate,
    "a cron expression": lambda text: checked_timing(text, None, "UTC", "The schedule"),
    "a time zone": lambda text: checked_timing("* * * * *", None, text, "The schedule"),
    "a cursor": read_cursor,
    "a name": lambda text: checked_name(text, "Queue"),
    "a wrong name": lambda text: did_you_mean(text, ["mail", "default"] * 500),
    "a text for people": lambda text: printable(text, 200),
    "a session": sessions.read,
    "a host": read_host,
    "a form": lambda text: form_field({"content-type": FORM}, text.encode()[:MAX_FORM_BYTES], "csrf"),
    "a flash": lambda text: flash.read(_request({"cookie": f"{flash.COOKIE}={text[:32_000]}"})),
    "the name of a secret": lambda text: REDACT({text: text}),
    "a new job": lambda text: NewJobBody.model_validate({"task": text, text[:99]: text, "args": [text]}),
    "an address of ours": lambda text: read_address(text.encode()),
    "a message to a client": lambda text: Conversation().hear([b"", frames.CLIENT, text.encode(), text.encode()], 0.0),
    "a message to a broker": lambda text: read([b"", frames.CLIENT, text.encode(), text.encode()]),
}


def _request(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})
