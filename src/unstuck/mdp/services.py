"""What a worker does with one request: find the function, call it, and put what comes of it into frames."""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unstuck.errors import ConfigError, UnknownName
from unstuck.mdp.protocol import MMI, Assignment, frame_of, is_service, reply_of

Function = Callable[..., Any]
MAX_TRACEBACK_CHARS = 8_000
SERVICE_PART = 3
"""The address that our broker gives is JOB.TOKEN.WORKER.SERVICE; a service may have dots of its own."""


@dataclass(frozen=True)
class Call:
    """The request that a function works on; given to functions with a parameter `call`."""

    address: bytes
    service: str
    _say: Callable[[bytes, dict[str, Any]], None]

    def progress(self, done: float | None = None, total: float | None = None, message: str | None = None) -> None:
        """Say how far it is. A plain broker is not told: it would not understand."""
        for name, value in (("done", done), ("total", total)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"call.progress: {name} must be a finite number or None, not {value!r:.80}.")
        told = {"done": done, "total": total, "message": message}
        self._say(self.address, {name: value for name, value in told.items() if value is not None})


@dataclass(frozen=True)
class Returned:
    """A reply for the caller."""

    address: bytes
    body: list[bytes]


@dataclass(frozen=True)
class RaisedError:
    """The function raised; what is known of it, for our broker."""

    address: bytes
    about: bytes


Outcome = Returned | RaisedError


class Services:
    """The services of a worker."""

    def __init__(self, services: Mapping[str, Function]) -> None:
        if not services:
            raise ConfigError('A worker serves something: Worker(endpoint, {"echo": function}).')
        for name, function in services.items():
            if not is_service(name.encode()) or name.encode().startswith(MMI):
                raise ConfigError(f"A service is printable ASCII without blanks and not mmi.something, not {name!r}.")
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"The service {name} needs a plain function, not {function!r}.")
        self.services = dict(services)
        self._want_call = {name for name, function in services.items() if "call" in _parameters(function)}

    @property
    def names(self) -> list[bytes]:
        return [name.encode() for name in self.services]

    def work(self, order: Assignment, say: Callable[[bytes, dict[str, Any]], None]) -> tuple[Outcome, Exception | None]:
        """Do what was ordered; gives the exception too, for the log."""
        try:
            name = self._service_of(order.address)
            more = {"call": Call(order.address, name, say)} if name in self._want_call else {}
            return Returned(order.address, reply_of(self.services[name](list(order.body), **more))), None
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is told to the broker and logged
            return RaisedError(order.address, frame_of(described(error))), error

    def _service_of(self, address: bytes) -> str:
        if len(self.services) == 1:
            return next(iter(self.services))
        parts = address.split(b".", SERVICE_PART)
        name = parts[SERVICE_PART].decode("ascii", "replace") if len(parts) > SERVICE_PART else ""
        if name not in self.services:
            raise UnknownName(f"This worker does not serve {name!r}.")
        return name


def is_unstuck_address(address: bytes) -> bool:
    """Return whether a broker of Unstuck gave this address; any other gives the identity of the client."""
    return address[:1].isdigit() and address.count(b".") >= SERVICE_PART


def described(error: Exception) -> dict[str, str]:
    trace = "".join(traceback.format_exception(error))
    return {
        "error": type(error).__name__,
        "message": _text(error),
        # The end of it is where it happened.
        "traceback": trace[-MAX_TRACEBACK_CHARS:].encode("utf-8", "replace").decode(),
    }


def _text(error: Exception) -> str:
    try:
        return str(error)[:MAX_TRACEBACK_CHARS].encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - user code again
        return "(its text could not be made)"


def _parameters(function: Function) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}  # A function in C that does not say.
