"""What became of one try to tell somebody."""

import msgspec


class Arrived(msgspec.Struct, frozen=True):
    """The target said so."""


class Lost(msgspec.Struct, frozen=True):
    """It did not, and why, in words without any secret."""

    reason: str
    maybe_arrived: bool = False
    """It had been sent: the answer may be all that is missing."""


Outcome = Arrived | Lost
