"""Who is told of what happens, and what is wrong and lasts."""

from collections.abc import Collection, Sequence
from typing import Protocol

from unstuck.store.records import AlertEvent, AlertTarget, ConditionChange, ConditionLook, ConditionRecord


class AlertVerbs(Protocol):
    def add_alert_target(self, target: str) -> None:
        """Write down, unless it is there, that this target (a fingerprint) is told of what happens from now on."""
        ...

    def alert_target(self, target: str) -> AlertTarget | None: ...

    def save_alert_target(self, target: str, version: int, event_id: int, state: str) -> bool:
        """Write how far it was told, if nobody did since this version was read; else False."""
        ...

    def events_to_tell(
        self, kinds: Collection[str], after_id: int, but: Collection[int], limit: int
    ) -> list[AlertEvent]:
        """Give events of these kinds, oldest first, without those whose ids are in `but`. Of events about jobs only
        'quarantined' is there to be told."""
        ...

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        """Look, in bounded looks, at what conditions are found by. Late is who has been silent for so long; None: for
        so long that it is suspect."""
        ...

    def conditions(self) -> list[ConditionRecord]: ...

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        """Write what began, lasts (with an event `KIND_still`, at most once in `remind_s`) or is over (`KIND_over`).
        Each step has one event, however many take it at once; gives how many were written."""
        ...
