"""The frames of Majordomo 0.1 and our extensions, in both directions, and bodies as bytes or CBOR."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2
import msgspec

from unstuck.domain.frames import read_map
from unstuck.errors import PayloadError


def frame_of(value: object) -> bytes:
    """Give the one frame of a value."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        return cbor2.dumps(value)
    except (cbor2.CBORError, RecursionError, ValueError, TypeError) as error:
        raise PayloadError(f"{value!r:.80} cannot be sent as CBOR: {error}") from error


def body_of(values: Iterable[object]) -> list[bytes]:
    """Give the body of a request: a frame for each value, and an empty one where there is none, as 0.1 wants one."""
    return [frame_of(value) for value in values] or [b""]


def reply_of(value: object) -> list[bytes]:
    """Give the body of a reply: bytes, several of them in a list or a tuple, or one value."""
    if isinstance(value, list | tuple) and value and all(isinstance(part, bytes) for part in value):
        return list(value)
    return [frame_of(value)]


def map_of(frame: bytes) -> dict[str, Any] | None:
    """Read a CBOR map with names for keys; None for anything else."""
    return read_map(frame)


EMPTY = b""
CLIENT = b"MDPC01"
WORKER = b"MDPW01"
OTHER_VERSIONS = (b"MDPC02", b"MDPW02")

READY = b"\x01"
REQUEST = b"\x02"
REPLY = b"\x03"
HEARTBEAT = b"\x04"
DISCONNECT = b"\x05"
PROCESSES = b"\x06"
"""From workers alone: it is at work. Never sent by a broker."""
FINISHED = b"\x07"
"""From workers alone: its reply follows. Never sent by a broker."""
WORKER_DIED = b"\x08"
NO_WORKERS = b"\x09"
NOTICES = (WORKER_DIED, NO_WORKERS)
NAME_TAKEN = "NAME_TAKEN"
TOO_MANY_SERVICES = "TOO_MANY_SERVICES"
"""Why a worker is turned away: another living worker has its name, or the ledger would know too many services."""

MMI = b"mmi."
MMI_NOTIFY = b"mmi.notify"
OK, NOT_FOUND, NOT_IMPLEMENTED = b"200", b"404", b"501"
REFUSED = b"403"
AUTOMATIC_IDENTITY_BYTES = 5
LEAST_IDENTITY_BYTES = 16
"""Of a client that wants to be told of deaths: automatic identities repeat in every fresh process."""
MAX_SERVICE_BYTES = 200
MAX_CORRELATION_BYTES = 2_000
"""It is echoed with all that is said of a request, also to a client that does not read."""

Frames = Sequence[bytes]
_PRINTABLE = bytes(range(0x21, 0x7F))


class Request(msgspec.Struct, frozen=True, gc=False):
    """A client asks for something."""

    service: bytes
    body: tuple[bytes, ...]
    correlation: bytes | None = None
    """The frame before the empty one, from a client that may send one; it is echoed."""


class Ready(msgspec.Struct, frozen=True, gc=False):
    services: tuple[bytes, ...]
    """More than one is our own extension."""
    about: bytes = EMPTY
    """A CBOR map of our own worker about itself, behind an empty frame; see `worker_ready`."""


class Reply(msgspec.Struct, frozen=True, gc=False):
    address: bytes
    body: tuple[bytes, ...]
    delimited: bool = True
    """The empty frame stood behind the address. The guide's worker in PHP leaves it out."""


class Heartbeat(msgspec.Struct, frozen=True, gc=False):
    pass


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """DISCONNECT."""

    about: bytes = EMPTY
    """A CBOR map of our own broker for our own worker: why it is turned away."""


class WorkerSignal(msgspec.Struct, frozen=True, gc=False):
    """PROCESSES or FINISHED: a word of progress, with the address of its request if the worker sent it."""

    command: bytes
    address: bytes = EMPTY
    about: bytes = EMPTY
    """A CBOR map of our own worker: how far it is, or that its function raised."""


class Invalid(msgspec.Struct, frozen=True, gc=False):
    """Anything else: dropped and counted. `from_worker` is known by its header."""

    why: str
    from_worker: bool = False


Message = Request | Ready | Reply | Heartbeat | Disconnect | WorkerSignal | Invalid


def read(frames: Frames) -> Message:
    """Read what came from a peer, without the identity that the socket put before it."""
    correlation = None
    if frames and frames[0] != EMPTY:
        if frames[0] in OTHER_VERSIONS:
            return Invalid(f"speaks {frames[0].decode()}, not 0.1")
        if len(frames) < 3 or frames[1] != EMPTY or frames[2] != CLIENT:
            return Invalid("no empty frame where one belongs")
        if len(frames[0]) > MAX_CORRELATION_BYTES:
            return Invalid("a correlation frame that is too long")
        correlation, frames = frames[0], frames[1:]
    if len(frames) < 2:
        return Invalid("too few frames")
    header, rest = frames[1], frames[2:]
    if header == CLIENT:
        return _read_request(rest, correlation)
    if header == WORKER:
        return _read_worker(rest)
    if header in OTHER_VERSIONS:
        return Invalid(f"speaks {header.decode()}, not 0.1", header == OTHER_VERSIONS[1])
    return Invalid("no header of Majordomo")


def _read_request(rest: Frames, correlation: bytes | None) -> Message:
    if len(rest) < 2:
        return Invalid("a request without a body")
    if not is_service(rest[0]):
        return Invalid("a service name that is not printable, or too long")
    return Request(rest[0], tuple(rest[1:]), correlation)


def _read_worker(rest: Frames) -> Message:
    if not rest:
        return Invalid("a worker that says nothing", from_worker=True)
    command, rest = rest[0], rest[1:]
    match command:
        case b"\x01" if rest:
            parting = rest.index(EMPTY) if EMPTY in rest else len(rest)
            services, about = tuple(rest[:parting]), rest[parting + 1 :]
            if services and len(about) <= 1 and all(is_service(service) for service in services):
                return Ready(services, about[0] if about else EMPTY)
        case b"\x03" if len(rest) >= 2 and rest[1] == EMPTY:
            # The guide's worker in C may send nothing behind it.
            return Reply(rest[0], tuple(rest[2:]) or (EMPTY,))
        case b"\x03" if len(rest) >= 2:
            return Reply(rest[0], tuple(rest[1:]), delimited=False)
        case b"\x04":
            return Heartbeat()
        case b"\x05":
            return Disconnect()
        case b"\x06" | b"\x07":
            return WorkerSignal(command, *rest[:2])
    # Not which one: these words are counted, and strangers could make up as many as memory holds.
    return Invalid("a worker's command that makes no sense", from_worker=True)


def is_service(name: bytes) -> bool:
    """Say whether this can be a service: printable ASCII, so that no byte of a command is taken for one."""
    return 0 < len(name) <= MAX_SERVICE_BYTES and not name.translate(None, _PRINTABLE)


def is_automatic(identity: bytes) -> bool:
    """Say whether a socket made this identity up: it may be somebody else's after a restart."""
    return len(identity) == AUTOMATIC_IDENTITY_BYTES and identity[:1] == b"\x00"


# What clients say ------------------------------------------------------------------------------


def client_request(service: bytes, body: Frames, correlation: bytes | None = None) -> list[bytes]:
    before = [] if correlation is None else [correlation]
    return [*before, EMPTY, CLIENT, service, *body]


# What workers say ------------------------------------------------------------------------------


def worker_ready(services: Sequence[bytes], about: bytes = EMPTY) -> list[bytes]:
    """Several services and `about` (CBOR: `{"name", "instance", "holding", "metadata", "pid", "host"}`) are for our own
    broker alone. `instance` is a secret of this process, by which it is known when it comes back. `holding` is the
    address of a request that it still works on, or whose outcome it could not hand over."""
    return [EMPTY, WORKER, READY, *services, *([EMPTY, about] if about else [])]


def worker_reply(address: bytes, body: Frames) -> list[bytes]:
    return [EMPTY, WORKER, REPLY, address, EMPTY, *body]


def worker_processes(address: bytes, about: bytes) -> list[bytes]:
    """To our own broker alone. `about` is CBOR: `{"done", "total", "message"}`, or `{"draining": true}` from a worker
    that wants nothing more after this request."""
    return [EMPTY, WORKER, PROCESSES, address, about]


def worker_finished(address: bytes, about: bytes) -> list[bytes]:
    """To our own broker alone: the function raised, and no reply follows. CBOR: `{"error", "message", "traceback"}`."""
    return [EMPTY, WORKER, FINISHED, address, about]


# What a broker says ----------------------------------------------------------------------------


def broker_reply(service: bytes, body: Frames, correlation: bytes | None = None) -> list[bytes]:
    return client_request(service, body, correlation)


def broker_request(address: bytes, body: Frames) -> list[bytes]:
    return [EMPTY, WORKER, REQUEST, address, EMPTY, *body]


def broker_notification(command: bytes, maps: Frames, correlation: bytes | None = None) -> list[bytes]:
    """Tell of a death, or that nobody is there: only to clients that asked for it."""
    before = [] if correlation is None else [correlation]
    return [*before, EMPTY, CLIENT, command, *maps]


# What both ends of a worker's line say ---------------------------------------------------------


def heartbeat() -> list[bytes]:
    return [EMPTY, WORKER, HEARTBEAT]


def disconnect(about: bytes = EMPTY) -> list[bytes]:
    """`about` is for our own workers alone. CBOR: `{"error", "message"}`."""
    return [EMPTY, WORKER, DISCONNECT, *([about] if about else [])]


@dataclass(frozen=True)
class ClientReply:
    """The reply to a request."""

    service: bytes
    body: tuple[bytes, ...]
    correlation: bytes | None = None


@dataclass(frozen=True)
class Notification:
    """News of a job of ours: one CBOR map, or several of one moment."""

    command: bytes
    maps: tuple[bytes, ...]
    correlation: bytes | None = None


@dataclass(frozen=True)
class Assignment:
    """Work for a worker; its reply carries the same address."""

    address: bytes
    body: tuple[bytes, ...]


def hear_as_client(heard: Frames) -> ClientReply | Notification | None:
    """None is what makes no sense: it is dropped."""
    correlation = None
    if len(heard) > 1 and heard[0] != EMPTY and heard[1] == EMPTY:
        correlation, heard = heard[0], heard[1:]
    if len(heard) < 3 or heard[0] != EMPTY or heard[1] != CLIENT:
        return None
    if heard[2] in NOTICES:
        return Notification(heard[2], tuple(heard[3:]), correlation)
    return ClientReply(heard[2], tuple(heard[3:]), correlation)


def hear_as_worker(heard: Frames) -> Assignment | Heartbeat | Disconnect | None:
    """None is what makes no sense: it is dropped."""
    if len(heard) < 3 or heard[0] != EMPTY or heard[1] != WORKER:
        return None
    match heard[2]:
        case _ if heard[2] == REQUEST and len(heard) >= 5 and heard[4] == EMPTY:
            return Assignment(heard[3], tuple(heard[5:]))
        case _ if heard[2] == HEARTBEAT:
            return Heartbeat()
        case _ if heard[2] == DISCONNECT:
            return Disconnect(heard[3] if len(heard) > 3 else EMPTY)
    return None
