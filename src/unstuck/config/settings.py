"""Everything that is not a rule of one task, checked when it is built."""

import os
from dataclasses import dataclass, field
from typing import TypedDict

from unstuck.config.groups import Alerts, HttpSettings, MdpSettings, Recovery
from unstuck.config.ledger_url import IN_MEMORY, check_url, resolved_url
from unstuck.config.urls import DEFAULT_SCHEMA
from unstuck.domain.text import settings_class
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError

DEFAULT_URL = "sqlite:///unstuck.db"
DEFAULT_QUEUE = "default"
LEAST_PROCESSES = 20
"""A runner needs some threads of its own."""
GROUPS: dict[str, type] = {"http": HttpSettings, "alerts": Alerts, "mdp": MdpSettings}
"""Settings with a table of their own in a file, and a prefix of their own in the environment."""
NO_WORKERS = ("warn", "error", "ignore")


@settings_class
@dataclass(frozen=True)
class Settings:
    """Everything that is not a rule of one task."""

    url: str = DEFAULT_URL
    recovery: Recovery = field(default_factory=Recovery)
    schema: str = DEFAULT_SCHEMA
    """The PostgreSQL schema that holds the ledger."""
    listen_url: str | None = None
    """A direct PostgreSQL address for wake-ups where `url` goes through a pooler."""
    notify: bool = True
    """Off: workers find new jobs by polling alone."""
    poll_interval: Duration = "2s"
    """How often an idle worker looks without having been woken."""
    shutdown_grace: Duration = "25s"
    stop_grace: Duration = "5s"
    """How long a job that must end may take to clean up before its runner is killed."""
    max_payload_bytes: int = 1024 * 1024
    max_output_bytes: int = 64 * 1024
    """How much of a job's stdout and of its stderr is kept, each."""
    connect_timeout: Duration = "10s"
    auto_migrate: bool = True
    """Create or update the tables on first use; off: only `unstuck migrate` does."""
    concurrency: int = 0
    """Slots of a worker; 0 means one per CPU."""
    recycle_after_jobs: int = 0
    """Replace a runner after so many jobs; 0 means never."""
    recycle_over_memory_bytes: int = 0
    """Replace a runner that is larger than this between two jobs; 0 means never."""
    max_processes: int = 1000
    """What one runner and all that its jobs start may be together; 0 means no limit."""
    no_workers: str = "warn"
    """What an enqueue does when nobody would take the job: "warn", "error" (it is stored all the same) or "ignore"."""
    http: HttpSettings = field(default_factory=HttpSettings)
    alerts: Alerts = field(default_factory=Alerts)
    mdp: MdpSettings = field(default_factory=MdpSettings)

    def __post_init__(self) -> None:
        if self.url != IN_MEMORY:
            check_url(self.url)
            object.__setattr__(self, "url", resolved_url(self.url))
        if self.listen_url is not None:
            check_url(self.listen_url)
        for switch in ("notify", "auto_migrate"):
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"{switch} must be true or false, not {getattr(self, switch)!r}.")
        if self.no_workers not in NO_WORKERS:
            raise ConfigError(f"no_workers must be one of {', '.join(NO_WORKERS)}, not {self.no_workers!r}.")
        schema = self.schema if isinstance(self.schema, str) else ""
        if not schema.isidentifier() or not schema.isascii() or len(schema) > 50:
            raise ConfigError(f"schema must be a plain SQL name of up to 50 characters, not {self.schema!r}.")
        for group, kind in GROUPS.items():
            if not isinstance(getattr(self, group), kind):
                raise ConfigError(f"{group} must be a table [{group}] in a file, not {getattr(self, group)!r}.")
        for name in ("poll_interval", "shutdown_grace", "stop_grace", "connect_timeout"):
            seconds(getattr(self, name), name)
        if self.poll_interval_s <= 0:
            raise ConfigError("poll_interval must be above zero.")
        for name, least in (
            ("max_payload_bytes", 1),
            ("max_output_bytes", 0),
            ("concurrency", 0),
            ("recycle_after_jobs", 0),
            ("recycle_over_memory_bytes", 0),
            ("max_processes", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        if 0 < self.max_processes < LEAST_PROCESSES:
            raise ConfigError(
                f"max_processes must be 0 (no limit) or at least {LEAST_PROCESSES}: a runner needs some for itself."
            )

    @property
    def poll_interval_s(self) -> float:
        return seconds(self.poll_interval, "poll_interval")

    @property
    def shutdown_grace_s(self) -> float:
        return seconds(self.shutdown_grace, "shutdown_grace")

    @property
    def stop_grace_s(self) -> float:
        return seconds(self.stop_grace, "stop_grace")

    @property
    def connect_timeout_s(self) -> float:
        return seconds(self.connect_timeout, "connect_timeout")

    @property
    def slots(self) -> int:
        return self.concurrency or os.cpu_count() or 1


class GivenSettings(TypedDict, total=False):
    """What `App(…)` takes by name beside `url` and `recovery`, for type checkers and editors; `Settings` checks it."""

    schema: str
    listen_url: str | None
    notify: bool
    poll_interval: Duration
    shutdown_grace: Duration
    stop_grace: Duration
    max_payload_bytes: int
    max_output_bytes: int
    connect_timeout: Duration
    auto_migrate: bool
    concurrency: int
    recycle_after_jobs: int
    recycle_over_memory_bytes: int
    max_processes: int
    no_workers: str
    http: HttpSettings
    alerts: Alerts
    mdp: MdpSettings
