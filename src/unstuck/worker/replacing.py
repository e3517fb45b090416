"""Decide when a dead worker is replaced: at once, then ever more slowly where replacements die too."""

from dataclasses import dataclass

STEADY_S = 10.0
"""A worker that served so long had started well: its death is the first of a new series."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
BRAKE_AT = 5
"""So many quick deaths in a row are a crash loop."""


@dataclass
class Replacing:
    """The record of one place in the fleet."""

    at_s: float = 0.0
    """Boot time before which nobody is put there."""
    deaths: int = 0
    """Quick deaths in a row."""
    last_code: int = 0
    ever_steady: bool = False
    by_itself: bool = True
    """Every death of this series was an exit of its own, not a signal from outside."""

    def after_death(self, now_s: float, *, lived_s: float, code: int) -> float:
        """Note a death and give the wait before the replacement; `lived_s` is how long it had been registered."""
        if lived_s >= STEADY_S:
            self.ever_steady = True
            self.deaths = 0
            self.by_itself = True
        self.deaths += 1
        self.last_code = code
        self.by_itself &= code > 0
        wait_s = 0.0 if self.deaths == 1 else min(FIRST_WAIT_S * 2.0 ** min(self.deaths - 2, 10), MAX_WAIT_S)
        self.at_s = now_s + wait_s
        return wait_s

    @property
    def braked(self) -> bool:
        return self.deaths >= BRAKE_AT

    @property
    def hopeless(self) -> bool:
        """It never worked, and each time it gave up by itself: waiting longer will not mend that."""
        return self.braked and self.by_itself and not self.ever_steady
