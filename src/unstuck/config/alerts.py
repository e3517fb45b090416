"""Alerts: whom to tell, of what, and how often."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import did_you_mean, settings_class

ALERT_KINDS = (
    *("worker_died", "no_workers", "quarantined", "crash_loop", "workflow_paused"),
    *("backlog_old", "heartbeat_late", "no_reaper", "task_failing", "schedule_failing"),
)
WEBHOOK_SCHEMES = ("http", "https")


@settings_class
@dataclass(frozen=True)
class Alerts:
    targets: tuple[str, ...] | str = field(default=(), repr=False)
    """Apprise URLs, or https://… for a signed webhook; separated by spaces in a variable."""
    kinds: tuple[str, ...] | str = ALERT_KINDS
    """Of what to tell; commas in a variable."""
    webhook_secret: str = field(default="", repr=False)
    """Signs what webhooks get, unless their URL brings a secret of its own."""
    allow_private: bool = False
    """Let webhooks lead to addresses of this machine and of private networks."""
    batch_window: Duration = "2s"
    """So long the first alert waits for company."""
    min_interval: Duration = "30s"
    """Between two messages to the same target; what comes meanwhile is gathered."""
    remind_every: Duration = "1h"
    """How often a condition that lasts is told again."""
    send_timeout: Duration = "10s"
    backlog_age: Duration = "10m"
    """A queue whose oldest ready job has waited for longer has a backlog."""
    heartbeat_late: Duration | None = None
    """Silence of a living worker that is worth a word; None: as long as makes it suspect."""
    unserved_after: Duration = "30s"
    """So long a queue with ready jobs may be without workers, as in a deploy."""
    failure_rate: float = 0.5
    """Share of failed jobs, from 0 to 1, from which on a task is failing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _targets(self.targets))
        object.__setattr__(self, "kinds", _kinds(self.kinds))
        for name in ("batch_window", "min_interval", "remind_every", "send_timeout", "backlog_age", "unserved_after"):
            seconds(getattr(self, name), f"alerts {name}")
        for name in ("remind_every", "send_timeout"):
            if seconds(getattr(self, name)) <= 0:
                raise ConfigError(f"alerts {name} must be above zero.")
        if isinstance(self.failure_rate, bool) or not isinstance(self.failure_rate, int | float):
            raise ConfigError(f"alerts failure_rate must be a number, not {self.failure_rate!r}.")
        if not 0 < self.failure_rate <= 1:
            raise ConfigError(f"alerts failure_rate must be above 0 and at most 1, not {self.failure_rate}.")
        if self.heartbeat_late is not None:
            seconds(self.heartbeat_late, "alerts heartbeat_late")
        if not isinstance(self.allow_private, bool):
            raise ConfigError(f"alerts allow_private must be true or false, not {self.allow_private!r}.")
        if not isinstance(self.webhook_secret, str):
            raise ConfigError("alerts webhook_secret must be a text.")

    @property
    def told_kinds(self) -> tuple[str, ...]:
        assert isinstance(self.kinds, tuple)
        return self.kinds

    @property
    def batch_window_s(self) -> float:
        return seconds(self.batch_window)

    @property
    def min_interval_s(self) -> float:
        return seconds(self.min_interval)

    @property
    def remind_every_s(self) -> float:
        return seconds(self.remind_every)

    @property
    def send_timeout_s(self) -> float:
        return seconds(self.send_timeout)

    @property
    def backlog_age_s(self) -> float:
        return seconds(self.backlog_age)

    @property
    def heartbeat_late_s(self) -> float | None:
        return None if self.heartbeat_late is None else seconds(self.heartbeat_late)

    @property
    def unserved_after_s(self) -> float:
        return seconds(self.unserved_after)


def _targets(given: object) -> tuple[str, ...]:
    if not isinstance(given, str | tuple | list) or not all(isinstance(item, str) for item in given):
        # What it holds may be a secret: it is not repeated.
        raise ConfigError("alerts targets must be a list of URLs.")
    texts = [given] if isinstance(given, str) else given
    targets = tuple(dict.fromkeys(word for text in texts for word in text.split()))
    for number, target in enumerate(targets, 1):
        try:
            parts = urlsplit(target)
            good = bool(parts.scheme) and "://" in target
            if parts.scheme in WEBHOOK_SCHEMES:
                # Of others Apprise alone knows what may stand where: a token in the place of a port, for one.
                good = bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"Alert target {number} is no URL. Use https://host/path for a webhook, or an Apprise URL such as "
                "slack://…, mailto://…."
            )
    return targets


def _kinds(given: object) -> tuple[str, ...]:
    if not isinstance(given, str | tuple | list):
        raise ConfigError(f"alerts kinds must be a list of {', '.join(ALERT_KINDS)}, not {given!r}.")
    words = given.split(",") if isinstance(given, str) else given
    kinds = tuple(dict.fromkeys(str(word).strip() for word in words if str(word).strip()))
    for kind in kinds:
        if kind not in ALERT_KINDS:
            raise ConfigError(
                f"There is no alert {kind!r}; there are {', '.join(ALERT_KINDS)}.{did_you_mean(kind, ALERT_KINDS)}"
            )
    return kinds
