"""Read the body of a request strictly: JSON without NaN and half characters. The guard saw to its type and its size."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from unstuck.http.auth.limits import LARGE_BYTES
from unstuck.http.problems import Problem

OUT_OF_RANGE = (
    "The body holds a number that is out of range: an integer has at most 4,300 digits, "
    "any other number is below 1.8e308."
)
CURE = "Send JSON with the header `Content-Type: application/json`."


def api_router(tag: str, prefix: str = "") -> APIRouter:
    """Give a router of the API whose bodies are read here."""
    return APIRouter(prefix=f"/api/v1{prefix}", tags=[tag], route_class=JsonRoute)


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        async def read_first(request: Request) -> Response:
            reading = _JsonRequest(request.scope, request.receive)
            await reading.read(field)
            return await handle(reading)

        return read_first


class _JsonRequest(Request):
    """What FastAPI asks for its JSON; it has been read by then, since FastAPI would blur what is wrong with it."""

    _value: Any = None

    async def read(self, field: ModelField) -> None:
        body = await self.body()
        if len(body) > LARGE_BYTES:
            # Beside the loop that serves the others. The guard has measured it.
            self._value = await asyncio.to_thread(_checked, body, field)
        elif body:
            self._value = _decoded(body)

    async def json(self) -> Any:
        return self._value


def _checked(body: bytes, field: ModelField) -> Any:
    """Return the model of a body. FastAPI takes it as it is; it would check plain values in the event loop."""
    value = _decoded(body)
    model, errors = field.validate(value, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors, body=value)
    return model


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise Problem(422, "too_deep", "The JSON is nested too deeply.", cure="Send flatter data.") from None
    except msgspec.ValidationError as error:
        # Without a type to check against, only numbers are refused this way.
        raise Problem(400, "not_json", OUT_OF_RANGE, cure="Send it as a string.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(400, "not_json", f"The body is not JSON: {_why_not(body)}.", cure=CURE) from error


def _why_not(body: bytes) -> str:
    """Ask Python's own reader, which is slower and says more; not about a large body."""
    if len(body) > LARGE_BYTES:
        return "it holds something that JSON does not allow"
    try:
        json.loads(body.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "it holds half of a surrogate pair"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
