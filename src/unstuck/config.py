"""Gather the settings from code, environment and file, check them once, and name the cure.

Code wins over `UNSTUCK_*`, which win over `unstuck.toml` or `[tool.unstuck]` in `pyproject.toml`,
which win over the defaults. Commands without an app read the same places.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

import msgspec

from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import did_you_mean
from unstuck.domain.policy import check_heartbeat

DEFAULT_URL = "sqlite:///unstuck.db"
DEFAULT_QUEUE = "default"
LEAST_PROCESSES = 20
LEAST_OPEN_FILES = 64
"""A runner needs some threads and descriptors of its own."""
EVIDENCE = ("neighbours", "session")
_SCHEMES = ("sqlite", "postgresql", "postgres")


@dataclass(frozen=True)
class Retention:
    """How long finished things are kept before the reaper removes them."""

    jobs: Duration = "7d"
    events: Duration = "7d"
    workers: Duration = "1d"

    def __post_init__(self) -> None:
        for item in fields(self):
            if seconds(getattr(self, item.name), f"retention of {item.name}") < 60:
                raise ConfigError(f"Retention of {item.name} must be at least one minute.")

    @property
    def jobs_s(self) -> float:
        return seconds(self.jobs)

    @property
    def events_s(self) -> float:
        return seconds(self.events)

    @property
    def workers_s(self) -> float:
        return seconds(self.workers)


@dataclass(frozen=True)
class Recovery:
    """How death is detected and what is done about it. `…_s` properties give plain seconds."""

    heartbeat_interval: Duration = "5s"
    heartbeat_timeout: Duration = "30s"
    claimed_stale_after: Duration | None = None
    running_stale_after: Duration | None = None
    runner_heartbeat_interval: Duration = "1s"
    check_interval: Duration = "1s"
    session_grace: Duration = "2s"
    auto_requeue_stale_claimed: bool = True
    auto_fail_stale_running: bool = True
    auto_disable_unhealthy: bool = True
    evidence: tuple[str, ...] | str = EVIDENCE
    retention: Retention | Duration = field(default_factory=Retention)

    def __post_init__(self) -> None:
        for name in ("heartbeat_interval", "heartbeat_timeout", "runner_heartbeat_interval", "check_interval"):
            if seconds(getattr(self, name), name) <= 0:
                raise ConfigError(f"Recovery {name} must be above zero.")
        seconds(self.session_grace, "session_grace")
        check_heartbeat("Recovery", self.heartbeat_interval_s, self.heartbeat_timeout_s)
        check_heartbeat("Recovery (claimed_stale_after)", self.heartbeat_interval_s, self.claimed_stale_after_s)
        check_heartbeat("Recovery (running_stale_after)", self.heartbeat_interval_s, self.running_stale_after_s)
        for switch in ("auto_requeue_stale_claimed", "auto_fail_stale_running", "auto_disable_unhealthy"):
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"Recovery {switch} must be true or false, not {getattr(self, switch)!r}.")
        # In a file or variable: "neighbours,session", or "none".
        text = self.evidence if isinstance(self.evidence, str) else ",".join(self.evidence)
        known = tuple(word.strip() for word in text.split(",") if word.strip() not in ("", "none"))
        for word in known:
            if word not in EVIDENCE:
                raise ConfigError(
                    f"Recovery evidence knows {' and '.join(EVIDENCE)}, not {word!r}.{did_you_mean(word, EVIDENCE)}"
                )
        object.__setattr__(self, "evidence", known)
        if not isinstance(self.retention, Retention):
            object.__setattr__(self, "retention", Retention(self.retention, self.retention, self.retention))

    @property
    def heartbeat_interval_s(self) -> float:
        return seconds(self.heartbeat_interval, "heartbeat_interval")

    @property
    def heartbeat_timeout_s(self) -> float:
        return seconds(self.heartbeat_timeout, "heartbeat_timeout")

    @property
    def claimed_stale_after_s(self) -> float:
        own = self.claimed_stale_after
        return self.heartbeat_timeout_s if own is None else seconds(own, "claimed_stale_after")

    @property
    def running_stale_after_s(self) -> float:
        own = self.running_stale_after
        return self.heartbeat_timeout_s if own is None else seconds(own, "running_stale_after")

    @property
    def runner_heartbeat_interval_s(self) -> float:
        return seconds(self.runner_heartbeat_interval, "runner_heartbeat_interval")

    @property
    def check_interval_s(self) -> float:
        return seconds(self.check_interval, "check_interval")

    @property
    def session_grace_s(self) -> float:
        return seconds(self.session_grace, "session_grace")

    @property
    def kept(self) -> Retention:
        assert isinstance(self.retention, Retention)
        return self.retention


@dataclass(frozen=True)
class Settings:
    """Everything that is not a rule of one task."""

    url: str = DEFAULT_URL
    recovery: Recovery = field(default_factory=Recovery)
    schema: str = "unstuck"
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
    max_open_files: int = 4096
    """How many descriptors a runner may hold; 0 leaves the system's limit."""

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.listen_url is not None:
            check_url(self.listen_url)
        for switch in ("notify", "auto_migrate"):
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"{switch} must be true or false, not {getattr(self, switch)!r}.")
        schema = self.schema if isinstance(self.schema, str) else ""
        if not schema.isidentifier() or not schema.isascii() or len(schema) > 50:
            raise ConfigError(f"schema must be a plain SQL name of up to 50 characters, not {self.schema!r}.")
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
            ("max_open_files", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}.")

        for name, least in (("max_processes", LEAST_PROCESSES), ("max_open_files", LEAST_OPEN_FILES)):
            if 0 < getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be 0 (no limit of ours) or at least {least}: a runner needs some for itself."
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


class _GivenRecovery(TypedDict, total=False):
    heartbeat_interval: Duration
    heartbeat_timeout: Duration
    claimed_stale_after: Duration | None
    running_stale_after: Duration | None
    runner_heartbeat_interval: Duration
    check_interval: Duration
    session_grace: Duration
    auto_requeue_stale_claimed: bool
    auto_fail_stale_running: bool
    auto_disable_unhealthy: bool
    evidence: tuple[str, ...] | str
    retention: Retention | Duration


class GivenSettings(_GivenRecovery, total=False):
    """What `App(…)` takes by name, for type checkers and editors; `Settings` and `Recovery` check it."""

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
    max_open_files: int


def load(overrides: Mapping[str, Any] | None = None, directory: Path | None = None) -> Settings:
    """Give the settings in force: `overrides` (code) over environment over file over defaults."""
    merged: dict[str, Any] = {**_from_file(directory or _here()), **_from_environment()}
    merged.update({name: value for name, value in (overrides or {}).items() if value is not None})
    return build(merged)


def build(values: Mapping[str, Any]) -> Settings:
    """Build settings from plain values, with the recovery settings nested or beside the others."""
    top = {item.name for item in fields(Settings)}
    inner = {item.name for item in fields(Recovery)}
    recovery: dict[str, Any] = {}
    ready: Recovery | None = None
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if name == "recovery" and isinstance(value, Recovery):
            ready = value
        elif name == "recovery" and isinstance(value, Mapping):
            recovery.update(_known(value, inner, "recovery setting"))
        elif name == "recovery":
            raise ConfigError(f"recovery must be a Recovery(…), or a table [recovery] in a file, not {value!r}.")
        elif name in inner:
            recovery.setdefault(name, value)
        else:
            rest.update(_known({name: value}, top, "setting"))
    if isinstance(recovery.get("retention"), Mapping):
        kept = {item.name for item in fields(Retention)}
        recovery["retention"] = Retention(**_known(recovery["retention"], kept, "retention"))
    if isinstance(recovery.get("evidence"), list):
        recovery["evidence"] = tuple(recovery["evidence"])
    settings = Settings(**rest)
    # Recovery given in code is complete in itself: what a file says must not shine through it.
    return replace(settings, recovery=ready if ready is not None else Recovery(**recovery))


def dump(settings: Settings) -> bytes:
    """Write settings as JSON, for the process that must not import the app."""
    return msgspec.json.encode(_plain(asdict(settings)))


def _plain(value: Any) -> Any:
    # JSON would write a timedelta in a form that no duration is read from.
    if isinstance(value, timedelta):
        return value.total_seconds()
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def restore(data: bytes) -> Settings:
    """Read back what `dump` wrote."""
    values = msgspec.json.decode(data)
    return build(values)


def check_url(url: str) -> None:
    """Refuse an address that no ledger can have, and say which can."""
    cure = "Use sqlite:///file.db or postgresql://user@host/database."
    if not isinstance(url, str) or "://" not in url:
        raise ConfigError(f"{url!r} is not a ledger URL. {cure}")
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        # The address may hold a password: say what is wrong with it, not what it is.
        raise ConfigError(f"The ledger URL cannot be read: {error}. {cure}") from None
    if scheme not in _SCHEMES:
        raise ConfigError(f"{scheme}:// is not a ledger that Unstuck knows.{did_you_mean(scheme, _SCHEMES)} {cure}")
    if scheme == "sqlite":
        path = url.removeprefix("sqlite://")
        if not path.startswith("/") or path in ("/", ""):
            raise ConfigError(f"{url!r} names no file. Use sqlite:///relative.db or sqlite:////absolute/path.db.")
        if path == "/:memory:":
            raise ConfigError(
                "sqlite:///:memory: cannot be shared with a worker process. Use a file, sqlite:///unstuck.db."
            )


def _known(values: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    for name in values:
        if name not in known:
            raise ConfigError(f"There is no {what} {name!r}.{did_you_mean(name, known)}")
    return dict(values)


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(f"The current directory cannot be used: {error.strerror}. Change to another one.") from error


def _from_file(directory: Path) -> dict[str, Any]:
    own = directory / "unstuck.toml"
    if own.is_file():
        return _read_toml(own)
    project = directory / "pyproject.toml"
    if project.is_file():
        section = _read_toml(project).get("tool", {}).get("unstuck", {})
        if not isinstance(section, dict):
            raise ConfigError(f"{project}: [tool.unstuck] must be a table, not {section!r}.")
        return section
    return {}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


_RESERVED_VARIABLES = frozenset({"UNSTUCK_FAILPOINTS", "UNSTUCK_LOG_LEVEL", "UNSTUCK_LOG_FORMAT", "UNSTUCK_APP"})


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = {item.name for cls in (Settings, Recovery) for item in fields(cls)} - {"recovery"}
    for variable, text in os.environ.items():
        if not variable.startswith("UNSTUCK_") or variable in _RESERVED_VARIABLES or not text:
            continue
        name = variable.removeprefix("UNSTUCK_").lower()
        if name not in known:
            # Variables of other tools or later versions must not stop a worker.
            continue
        found[name] = _typed(name, variable, text)
    return found


def _typed(name: str, variable: str, text: str) -> Any:
    default = next((item.default for cls in (Settings, Recovery) for item in fields(cls) if item.name == name), None)
    if isinstance(default, bool):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{variable} must be true or false, not {text!r}.")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError as error:
            raise ConfigError(f"{variable} must be a whole number, not {text!r}.") from error
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
