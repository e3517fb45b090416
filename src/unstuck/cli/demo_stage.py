"""Hold what the views show: the fleet, the stream, the deaths and the score, as they stand now."""

import time
from dataclasses import dataclass, field

from unstuck.cli.demo_door import DemoDoor
from unstuck.cli.demo_fleet import Fleet
from unstuck.cli.demo_killer import Death, Killer
from unstuck.cli.demo_lookout import Lookout
from unstuck.domain.states import JobState


@dataclass
class Stage:
    seconds: float
    workers: int
    kill_every_s: float
    ledger: str
    fleet: Fleet
    lookout: Lookout
    door: DemoDoor
    killer: Killer | None = None
    began_s: float | None = None
    """Monotonic; None while the fleet is starting."""
    sentence: str = ""
    born_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Since the stream began; below zero there is no time."""
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    @property
    def storming(self) -> bool:
        return self.began_s is not None and self.elapsed_s < self.seconds

    @property
    def deaths(self) -> list[Death]:
        return list(self.killer.deaths) if self.killer else []

    def score(self) -> list[tuple[str, int, str]]:
        """Give the running score: name, number, style."""
        seen = self.lookout
        lost = seen.lost
        return [
            ("enqueued", seen.enqueued, "bold"),
            ("succeeded", seen.ended[JobState.SUCCEEDED], "green"),
            ("unfinished", seen.unfinished, ""),
            ("failed by design", seen.ended[JobState.FAILED], ""),
            ("retried after a crash", sum(death.requeued for death in self.deaths), "yellow"),
            ("LOST", lost, "bold red" if lost else "bold green"),
        ]
