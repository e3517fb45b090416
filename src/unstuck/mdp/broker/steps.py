"""A step towards the ledger, which may be done in smaller steps if it cannot be done as it is."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unstuck.errors import LedgerBusy, RefusedValue


def _as_it_is(error: LedgerBusy | RefusedValue) -> "Sequence[Step] | None":
    return None


class Step(NamedTuple):
    do: Callable[[], None]
    """May be repeated after an outage."""
    instead: "Callable[[LedgerBusy | RefusedValue], Sequence[Step] | None]" = _as_it_is
    """Return the steps to do in place of this one, because another session holds a lock that it needs or because one of
    its values cannot be stored. No steps: it was deferred or dropped. None: repeat it as it is."""
