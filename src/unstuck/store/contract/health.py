"""Who is ill, and the switching off and on of workers and hosts."""

from typing import Protocol

from unstuck.domain.health import Standing
from unstuck.store.records import HostRecord


class HealthVerbs(Protocol):
    def standings(self, dead_for_s: float) -> list[Standing]:
        """Give what health is judged by: the living, and those that died or stopped at most so long ago and since
        their host was last enabled."""
        ...

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        """Switch a living worker off, with an event; it hears of it in its next beat. False: it is not living, or off
        already. With `auto` it is also left alone where it is the last that serves one of its queues, which is looked
        at under a lock: two who switch off two at once cannot both be right."""
        ...

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        """Take that back, and forget the health that it reported; False when it was not switched off itself."""
        ...

    def disable_host(self, host: str, reason: str, by: str, *, auto: bool = False) -> bool:
        """The same for every worker of a host, those not born yet included; its name need not be known."""
        ...

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        """Take that back; earlier deaths on that host count no more. False when it was not disabled."""
        ...

    def hosts(self) -> list[HostRecord]:
        """Give the hosts of which something was decided."""
        ...
