"""What those who listen are told."""

from collections.abc import Collection
from typing import Protocol

from unstuck.store.records import Glance


class TellingVerbs(Protocol):
    def note_event(
        self,
        kind: str,
        message: str,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        about: str | None = None,
    ) -> int:
        """Write an event that belongs to no other verb; give its id. `about` names what is neither job nor worker."""
        ...

    def glance(self, job_ids: Collection[int]) -> list[Glance]:
        """Say where these jobs stand; those that do not exist are left out."""
        ...

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Give those pairs of queue and task that no worker would take now: none lives that serves the one and knows
        the other, or all that do are leaving or switched off."""
        ...
