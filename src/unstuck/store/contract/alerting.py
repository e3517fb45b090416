"""Who is told of what happens, and what is wrong and lasts."""

from collections.abc import Collection, Sequence
from typing import Protocol

from unstuck.domain.cursor import Cursor
from unstuck.store.records import AlertPage, AlertTarget, ConditionChange, ConditionLook, ConditionRecord


class AlertVerbs(Protocol):
    def add_alert_target(self, target: str) -> None:
        """Write down, unless it is there, that this target (a fingerprint) is told of what happens from now on."""
        ...

    def alert_target(self, target: str) -> AlertTarget | None: ...

    def save_alert_target(self, target: str, version: int, position: str, state: str) -> bool:
        """Write how far it was told, if nobody did since this version was read; else False."""
        ...

    def events_to_tell(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
        """Return events of these kinds behind a position, in the order of their transactions, without those whose ids
        are in `but`. Of events about jobs only 'quarantined' and 'workflow_paused' are there to be told."""
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
