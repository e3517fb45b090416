"""Every reader of foreign bytes and texts, by name: what the tests and the fuzzer try to break."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import msgspec
from fastapi import Request
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ValidationError
from tests.mdp.fake_ledger import broker

from unstuck.app import App
from unstuck.client import views
from unstuck.client.workflows.description import build
from unstuck.domain import frames
from unstuck.domain.bounded_cbor import decode_cbor
from unstuck.domain.bounded_json import check_json, decode_json
from unstuck.domain.bounds import Bounds
from unstuck.domain.event_cursor import read_cursor
from unstuck.domain.frames import (
    FRAMES,
    pack_frames,
    read_fields,
    read_json_fields,
    read_object,
    read_value,
    unpack_frames,
)
from unstuck.domain.limits import KeyRule, read_rate
from unstuck.domain.node_inputs import Part, pack_inputs
from unstuck.domain.payload import JSON, encode_call
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.schedules import checked_timing
from unstuck.domain.text import checked_name, did_you_mean, one_line
from unstuck.domain.units import seconds, size_bytes
from unstuck.domain.workflows import call_with_results
from unstuck.errors import ConfigError, PayloadError
from unstuck.http import create_app
from unstuck.http.api.workflows import described
from unstuck.http.auth import sessions
from unstuck.http.auth.limits import FORM, MAX_FORM_BYTES, form_field
from unstuck.http.auth.origins import read_host
from unstuck.http.dashboard import rendering
from unstuck.http.problems import Problem
from unstuck.http.routing import _checked
from unstuck.http.schemas import NewJobBody, NewWorkflowBody
from unstuck.http.workers import protocol
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.mdp import protocol as mdp_protocol
from unstuck.mdp.broker.jobs import json_of, raised_in, read_calls
from unstuck.mdp.broker.request_addresses import read_address
from unstuck.mdp.client_session import ClientSession
from unstuck.mdp.protocol import Request as MdpRequest
from unstuck.mdp.protocol import map_of, read
from unstuck.remote.registry import checked_metadata

REFUSALS = (PayloadError, ConfigError, Problem, ValidationError, ValueError)
"""What a reader may raise. Anything else would be an internal error of whoever called it."""
REDACT = Redactor(())

BOUNDS = Bounds(8 * 1024 * 1024, setting="http.max_body_bytes")
_KEYED = Policy(order=KeyRule(key="of:{a}", parameters=("a",)))
_TASKS = {"sum": TaskRecord("sum", "sum", encode_policy(_KEYED))}

_NODES = {"a": TaskRecord("a", "a", encode_policy(Policy()))}


_ROOM = 1024
_BODY_BOUNDS = Bounds(8 * 1024 * 1024 + _ROOM, setting="http.max_body_bytes")


def _body(read: Callable[[bytes], object], before: bytes, after: bytes) -> Callable[[bytes], object]:
    """Return the reader of a request's body around these bytes. It is measured first, as the server does."""

    def read_all(data: bytes) -> object:
        body = before + data + after
        check_json(body, _BODY_BOUNDS, "The body")
        try:
            return read(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            # Answered by the usual way.
            raise PayloadError(str(error)) from error

    return read_all


def _workflow(body: bytes) -> object:
    asked = NewWorkflowBody.model_validate(msgspec.json.decode(body))
    return build(App(url="sqlite:///never-opened.db")._runtime, _NODES, asked.name, described(asked.nodes))


_NODE = b'{"name":"w","nodes":[{"name":"a","task":"a"},{"task":"a",'
_SUCCESS = b'[{"job_id":1,"token":1,"outcome":"succeeded","result":'
_BODIES: dict[str, Callable[[bytes], object]] = {
    "a beat over HTTP": _body(protocol._read_beat, b'{"worker_id":"w","metadata":{"a":', b"}}"),
    "a turn over HTTP": _body(protocol._turn_decoder.decode, b'{"settle":' + _SUCCESS, b"}]}"),
    "what a worker has": _body(protocol._turn_decoder.decode, b'{"claim":1,"have":[1,', b"]}"),
    "a claim over HTTP": _body(protocol._claim_decoder.decode, b'{"have":[1,', b"]}"),
    "a start over HTTP": _body(protocol._start_decoder.decode, b'{"jobs":[{"job_id":1,"token":1},', b"]}"),
    "outcomes over HTTP": _body(protocol._settle_decoder.decode, b'{"jobs":' + _SUCCESS, b"}]}"),
    "a workflow over HTTP": _body(_workflow, b'{"name":"w","nodes":[{"name":"a","task":"a"},', b"]}"),
    "arguments of a node": _body(_workflow, _NODE + b'"args":[', b"]}]}"),
    "nodes that come first": _body(_workflow, _NODE + b'"after":["a",', b"]}]}"),
}


def _route_bodies() -> dict[str, Callable[[bytes], object]]:
    """Return a reader for each field that holds a list, an object or any JSON, of each body that the API takes."""
    found = {}
    for route in iter_route_contexts(create_app("sqlite:///never-opened.db").routes):
        body = getattr(route.original_route, "body_field", None)
        for name, field in {} if body is None else _model_of(body.field_info.annotation).model_fields.items():
            if set(re.findall(r"\b(?:list|dict|Any|[A-Z]\w*Body|Where)\b", str(field.annotation))):
                read = partial(_read_body, body)
                path = str(route.path)
                found[f"{name} of {path.removeprefix('/api/v1')}"] = _body(read, b'{"%s":' % name.encode(), b"}")
    return found


def _model_of(annotation: Any) -> type[BaseModel]:
    """Return the model of a body, which may be left out."""
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel)]
    return kinds[0]


def _read_body(field: ModelField, data: bytes) -> object:
    try:
        return _checked(data, field)
    except RequestValidationError as error:
        raise PayloadError("; ".join(str(one["msg"]) for one in error.errors()[:20])) from None


def _ready(data: bytes) -> object:
    """Let a broker hear a worker that says this of itself, and a client that asks for notices with it."""
    core = broker()
    core.on_message(b"c" * 16, [b"", b"MDPC01", b"mmi.notify", data], None, 0.0)
    return core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo", b"", data], 3, 0.0)


def _node_call(data: bytes) -> bytes:
    """Fill a result into the places of a node's call that refer to it."""
    refs: list[tuple[list[str | int], int]] = [(["args", place], 1) for place in range(1_000)]
    payload = encode_call((None,) * 1_000, {}, "add", 1_000_000, refs=refs)
    return msgspec.json.encode(call_with_results(payload, pack_inputs([Part(1, False, None, data)])))


STORED: dict[str, Callable[[bytes], object]] = {
    **_BODIES,
    **_route_bodies(),
    "a peer about itself": _ready,
    "a result in a node's call": _node_call,
    "JSON": lambda data: decode_json(data, BOUNDS),
    "CBOR": lambda data: decode_cbor(data, BOUNDS),
    "a heartbeat over HTTP": lambda data: checked_metadata(decode_json(data, BOUNDS, type=dict[str, Any])),
    "a request at the broker": lambda data: read_calls(MdpRequest(b"sum", (data,)), _TASKS, 3, "mdp"),
    "options at the broker": lambda data: read_calls(MdpRequest(b"sum", (data, b"\xa0"), data[:2_000]), {}, 3, "mdp"),
    "a reply at the broker": lambda data: json_of([data]),
    "an error at the broker": raised_in,
    "arguments of a task": lambda data: frames.arguments(pack_frames([data])),
    "options and arguments": lambda data: frames.arguments(pack_frames([b"\xa0", data])),
    "some arguments": lambda data: frames.named_arguments(pack_frames([data]), {"a"}),
    "a shown call": lambda data: views.call_view(pack_frames([data]), FRAMES),
    "a shown call of several frames": lambda data: frames.show_call(
        pack_frames([data[: len(data) // 2], data[-9:], data])
    ),
    "a shown reply": lambda data: frames.show_reply(pack_frames([data]), pack_frames([b"\xa0"])),
    "a reply": lambda data: frames.read_reply(pack_frames([data]), pack_frames([b"\xa0"])),
    "a shown value": lambda data: REDACT(views.value_view(data, JSON)),
    "shown arguments": lambda data: REDACT(views.call_view(data, JSON)[1]),
    "what a frame means": read_value,
    "packed frames": unpack_frames,
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
    "a text for people": lambda text: one_line(text, 200),
    "a session": sessions.read,
    "a host": read_host,
    "a form": lambda text: form_field({"content-type": FORM}, text.encode()[:MAX_FORM_BYTES], "token"),
    "a flash": lambda text: rendering.read(_request({"cookie": f"{rendering.COOKIE}={text[:32_000]}"})),
    "the name of a secret": lambda text: REDACT({text: text}),
    "a new job": lambda text: NewJobBody.model_validate({"task": text, text[:99]: text, "args": [text]}),
    "an address of ours": lambda text: read_address(text.encode()),
    "a message to a client": lambda text: ClientSession().hear(
        [b"", mdp_protocol.CLIENT, text.encode(), text.encode()], 0.0
    ),
    "a message to a broker": lambda text: read([b"", mdp_protocol.CLIENT, text.encode(), text.encode()]),
}


def _request(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})
