"""A shutdown under way: until when jobs may run, and until when their outcomes are handed in."""

from dataclasses import dataclass

LAST_WORDS_S = 10.0
"""How long a drained worker tries on to hand in its last outcomes."""


@dataclass
class Drain:
    deadline_s: float | None
    """When what still runs is killed; None: jobs may take as long as they need."""
    give_up_s: float | None = None
    """When to leave the last outcomes to the reaper."""

    def hear_signal(self, now_s: float, grace_s: float) -> bool:
        """Take one more signal; True when it means to hurry. An operator's drain has no end: a signal gives it one."""
        hurry = self.deadline_s is not None
        self.deadline_s = 0.0 if hurry else now_s + grace_s
        return hurry

    def is_over(self, now_s: float) -> bool:
        """Say, once, that the grace is over and what still runs must be killed."""
        if self.deadline_s is None or now_s <= self.deadline_s or self.give_up_s is not None:
            return False
        self.give_up_s = now_s + LAST_WORDS_S
        return True

    def nothing_runs(self, now_s: float, grace_s: float) -> None:
        """Begin to count down: only outcomes are left, and whether they can be handed in is not known."""
        if self.give_up_s is None:
            self.give_up_s = now_s + min(LAST_WORDS_S, grace_s)

    def gives_up(self, now_s: float) -> bool:
        return self.give_up_s is not None and now_s > self.give_up_s
