"""What keeps schedules: their definitions, and exactly one enqueue per tick."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from unstuck.domain.schedules import ScheduleDefinition, Source
from unstuck.store.records import FIRE_WAIT_S, DueSchedules, Firing, ScheduleRecord


class ScheduleVerbs(Protocol):
    def know_schedules(self, definitions: Sequence[ScheduleDefinition], source: Source) -> list[str]:
        """Write definitions down; one that changed takes the place of the old one, and where its times changed it
        begins anew. Gives the names of those that are new or changed. A pause stays."""
        ...

    def differing_schedules(self, known: Mapping[str, str]) -> list[tuple[ScheduleRecord, bool]]:
        """Return the schedules of apps that have another fingerprint than the one given for their name, each with
        whether a living worker knows it as it is."""
        ...

    def restore_schedule(self, definition: ScheduleDefinition, replaces: str, message: str) -> bool:
        """Write the definition of an app down again, with an event, if the one with this fingerprint is in force and an
        app made it. Return False if it is not. A pause stays."""
        ...

    def schedules(self) -> list[ScheduleRecord]:
        """Give every schedule, by name."""
        ...

    def due_schedules(self, fingerprints: Collection[str], after: Sequence[str] = ()) -> DueSchedules:
        """Give those that need somebody now, of those with these fingerprints and those that operators made: due, just
        begun, or ahead of the clock. Paused ones are left out. Those named in `after` come last, in that order."""
        ...

    def fire_schedule(self, firing: Firing, wait_s: float = FIRE_WAIT_S) -> list[int] | None:
        """Enqueue the jobs of a tick and move the schedule on, in one commit, if nobody did since this version was
        read; else None. Gives the ids of the jobs (of one with the same unique key, where that is unfinished).
        Raises LedgerBusy if another session has held a lock that it needs for longer than `wait_s`."""
        ...

    def pause_schedule(self, name: str, paused: bool, by: str) -> bool:
        """Stop it, or let it go on from now; False where it is so already or does not exist. With an event."""
        ...

    def remove_schedule(self, name: str, by: str) -> bool:
        """Forget it, with an event. What it enqueued stays."""
        ...
