"""What a worker says about itself with READY: name, host, metadata, its key and the job that it still has."""

from dataclasses import dataclass
from typing import Any

import msgspec

from unstuck.domain.endings import storable_text
from unstuck.domain.frames import read_note
from unstuck.mdp import protocol
from unstuck.mdp.broker.request_addresses import key_of, read_address

MAX_NAME_CHARS = 100
MAX_METADATA_BYTES = 10_000


@dataclass(frozen=True)
class Introduction:
    """Empty for old workers, which send nothing but their service."""

    name: str
    host: str
    metadata: dict[str, Any]
    key: str | None
    """The same whenever this process comes back."""
    held_address: bytes | None
    """Address of the request that it works on, or whose outcome it could not deliver."""


def read_introduction(ready: protocol.Ready) -> Introduction:
    """Read what a worker says about itself. Unusable parts are left out."""
    about = read_note(ready.about) or {}
    held_address = about.get("holding")
    is_address = isinstance(held_address, bytes) and read_address(held_address) is not None
    return Introduction(
        _text(about.get("name")),
        _text(about.get("host")),
        _storable(about.get("metadata")),
        key_of(about.get("instance")),
        held_address if is_address else None,
    )


def _text(value: object) -> str:
    return storable_text(value, MAX_NAME_CHARS) if isinstance(value, str) else ""


def _storable(metadata: object) -> dict[str, Any]:
    """Return metadata in a form that every database stores, or nothing if that is not possible."""
    try:
        encoded = msgspec.json.encode(metadata)
        if len(encoded) > MAX_METADATA_BYTES or rb"\u0000" in encoded:
            return {}
        plain = msgspec.json.decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return {}
    return plain if isinstance(plain, dict) else {}
