"""Say when a job that failed or crashed is tried again."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from unstuck.domain.jitter import jitter
from unstuck.domain.text import did_you_mean, settings_class
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError

Backoff = Literal["exponential", "linear", "constant"]
_BACKOFFS = ("exponential", "linear", "constant")

CRASH_BACKOFF_FIRST_S = 0.1
CRASH_BACKOFF_MAX_S = 30.0
REPEATED_CRASH_S = 1.0
"""The least wait if the job died on the same worker before and nothing else ended there since: other jobs go first, and
show whether it is the job or the worker."""
PAIR_EXCUSED_S = 2.0
"""The wait if only two different jobs died there by turns."""
EXCUSED_FIRST_S = 30.0
EXCUSED_GROWTH = 3.0
EXCUSED_MAX_S = 3600.0
"""Waits of a job that is excused since everything dies on its worker."""
MAX_EXPONENT = 32
JITTER = 0.1
MAX_ATTEMPTS = 10_000


class RetryRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Retry` as it is stored with a job: plain numbers."""

    max_attempts: int = 1
    backoff: Backoff = "exponential"
    delay_s: float = 1.0
    max_delay_s: float = 600.0


@settings_class
@dataclass(frozen=True)
class Retry:
    """What to do when user code raises: how often to try, and how long to wait in between."""

    max_attempts: int = 3
    backoff: Backoff = "exponential"
    delay: Duration = "1s"
    max_delay: Duration = "10m"

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int):
            raise ConfigError(f"Retry max_attempts must be a whole number, not {self.max_attempts!r}.")
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ConfigError(f"Retry max_attempts must be 1 to {MAX_ATTEMPTS}, not {self.max_attempts}.")
        if self.backoff not in _BACKOFFS:
            raise ConfigError(
                f"Retry backoff must be one of {', '.join(_BACKOFFS)}, not {self.backoff!r}."
                f"{did_you_mean(str(self.backoff), _BACKOFFS)}"
            )
        self.rule()

    def rule(self) -> RetryRule:
        return RetryRule(
            self.max_attempts,
            self.backoff,
            seconds(self.delay, "Retry delay"),
            seconds(self.max_delay, "Retry max_delay"),
        )


def retry_delay_s(retry: RetryRule, failures: int, chance: float | None = None) -> float:
    """Give the wait before the next try after `failures` failures (1 or more)."""
    assert failures >= 1
    match retry.backoff:
        case "constant":
            wait_s = retry.delay_s
        case "linear":
            wait_s = retry.delay_s * failures
        case "exponential":
            wait_s = retry.delay_s * 2.0 ** min(failures - 1, MAX_EXPONENT)
    # Jobs that failed together must not all come back in the same instant.
    spread = jitter.random() if chance is None else chance
    return float(min(wait_s, retry.max_delay_s) * (1.0 - JITTER * spread))


def crash_delay_s(crashes: int) -> float:
    """Give the short, growing wait before a crashed job is tried again."""
    assert crashes >= 1
    return float(min(CRASH_BACKOFF_FIRST_S * 2.0 ** min(crashes - 1, MAX_EXPONENT), CRASH_BACKOFF_MAX_S))


def excused_delay_s(excuses: int) -> float:
    """Return the long, growing wait of a job that died on a worker under which everything dies.

    `excuses` were made for it before."""
    return float(min(EXCUSED_FIRST_S * EXCUSED_GROWTH ** min(excuses, MAX_EXPONENT), EXCUSED_MAX_S))
