"""Say how much a foreign message may hold, and what is raised if it holds more.

Eight megabytes of JSON or CBOR can stand for hundreds of megabytes of Python objects, or for minutes of work in one
dict. So messages are measured as bytes first, and objects are built only if they are within these bounds.
"""

from dataclasses import dataclass, replace
from typing import Literal

from unstuck.errors import PayloadError

MAX_DEPTH = 64
BYTES_PER_VALUE = 32
"""A message may hold one value per so many bytes of its size limit: 262,144 values at a limit of 8 MiB.

A value costs up to 116 bytes of memory, and text up to four times its bytes. Together that stays below 100 MB.
"""
FEWEST_VALUES = 65_536
USUAL_BYTES = 8 * 1024 * 1024
MAX_SHOWN = 100_000
TOO_MUCH = "(too much to show)"
SHOWN_BYTES = 1024 * 1024
"""Of the values in a job's journal, and as much of those that came with its signals. The largest are left out."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one message may hold."""

    size_bytes: int
    depth: int = MAX_DEPTH
    setting: str = ""
    """The setting that raises `size_bytes` and, with it, the number of values."""
    values: int = -1
    """How many values it may hold: numbers, texts, arrays and maps, and the keys of maps. If not given it follows from
    the size."""

    def __post_init__(self) -> None:
        if self.values < 0:
            object.__setattr__(self, "values", max(FEWEST_VALUES, self.size_bytes // BYTES_PER_VALUE))

    def after(self, values: int) -> "Bounds":
        """Return what is left for the next part of a message."""
        return replace(self, values=max(0, self.values - values))

    @property
    def cure(self) -> str:
        """What to do about too many bytes or values."""
        return f"send less at once, or raise {self.setting}" if self.setting else "send less at once"


def stored(data: bytes) -> Bounds:
    """Return the bounds for bytes that a door has let in: their size is settled, what they stand for is not."""
    return _USUAL if len(data) <= USUAL_BYTES else Bounds(len(data))


def shown(data: bytes) -> Bounds:
    """Return the bounds for stored bytes that people look at: nobody reads more than this."""
    return Bounds(max(len(data), USUAL_BYTES), values=MAX_SHOWN)


_USUAL = Bounds(USUAL_BYTES)


Exceeded = Literal["bytes", "values", "depth", "numbers"]


class NotDecodable(PayloadError):
    """Bytes that are not what they should be: no JSON, no CBOR, or a kind of CBOR that is refused."""


class BoundExceeded(PayloadError):
    """A message that holds more than it may; `exceeded` names the bound."""

    def __init__(self, exceeded: Exceeded, message: str) -> None:
        super().__init__(message)
        self.exceeded: Exceeded = exceeded


def check_size(size_bytes: int, bounds: Bounds, what: str) -> None:
    if size_bytes > bounds.size_bytes:
        raise BoundExceeded(
            "bytes", f"{what} has {size_bytes:,} bytes; at most {bounds.size_bytes:,} are allowed: {bounds.cure}."
        )


def too_many_values(bounds: Bounds, what: str) -> BoundExceeded:
    return BoundExceeded(
        "values", f"{what} holds more than {bounds.values:,} values, its keys included: {bounds.cure}."
    )


def too_deep(bounds: Bounds, what: str) -> BoundExceeded:
    return BoundExceeded(
        "depth", f"{what} is nested more than {bounds.depth} deep: send flatter data, or put it into a text."
    )
