"""The groups of settings: recovery, retention, HTTP, ZeroMQ and alerts."""

from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from unstuck.domain.api_tokens import LEAST_GIVEN_CHARS, MAX_TOKEN_CHARS
from unstuck.domain.policy import check_heartbeat, check_runner_heartbeat
from unstuck.domain.recovery_rules import EVIDENCE, Kept, RecoveryRules
from unstuck.domain.text import did_you_mean, settings_class
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError


@settings_class
@dataclass(frozen=True)
class Retention:
    """How long finished things are kept before the reaper removes them."""

    jobs: Duration = "7d"
    events: Duration = "7d"
    workers: Duration = "1d"
    audit: Duration = "90d"

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

    @property
    def audit_s(self) -> float:
        return seconds(self.audit)


@settings_class
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
        check_runner_heartbeat(
            "Recovery", self.runner_heartbeat_interval_s, self.running_stale_after_s, "running_stale_after"
        )
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
            kept = self.retention
            object.__setattr__(self, "retention", Retention(kept, kept, kept, kept))

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

    @property
    def rules(self) -> RecoveryRules:
        """The part of these settings that a worker stores in the ledger for all who judge it."""
        assert isinstance(self.evidence, tuple)
        kept = self.kept
        return RecoveryRules(
            auto_requeue_stale_claimed=self.auto_requeue_stale_claimed,
            auto_fail_stale_running=self.auto_fail_stale_running,
            auto_disable_unhealthy=self.auto_disable_unhealthy,
            evidence=self.evidence,
            session_grace_s=self.session_grace_s,
            check_interval_s=self.check_interval_s,
            kept=Kept(kept.jobs_s, kept.events_s, kept.workers_s, kept.audit_s),
        )


DEFAULT_PORT = 8642
LEAST_CLIENT_TIMEOUT_S, MAX_CLIENT_TIMEOUT_S = 0.1, 3600.0
"""The kernel takes one of these timeouts as whole milliseconds: 0 would be none, and above 24 days they overflow."""


@settings_class
@dataclass(frozen=True)
class HttpSettings:
    host: str = "127.0.0.1"
    """Any other address than this machine's own needs a token."""
    port: int = DEFAULT_PORT
    """0 takes a free one and says which."""
    allowed_hosts: tuple[str, ...] | str = ()
    """Names under which it may be asked for, beside the address that it listens on; commas in a variable."""
    token: str | None = field(default=None, repr=False)
    """A token with every scope, beside those in the ledger: for a container that gets its secrets by variables."""
    secure_cookies: bool = False
    """Something in front of it speaks HTTPS: cookies are sent over that alone."""
    max_body_bytes: int = 8 * 1024 * 1024
    requests_per_second: int = 5000
    """Of one caller, in the long run; ten seconds' worth at once. 0: no limit."""
    max_open_requests: int = 4000
    max_open_requests_per_caller: int = 2000
    """Long polls and streams are requests that stay open: each worker that waits for a job is one."""
    head_timeout: Duration = "15s"
    """How long a client may take to send the first line and the headers of a request."""
    body_timeout: Duration = "10s"
    """Longest pause between two pieces of a request's body. The whole body may take six times as long."""
    unread_timeout: Duration = "30s"
    """How long an answer waits for a client that reads nothing of it (Linux)."""
    redact: tuple[str, ...] | str = ()
    """Arguments whose values no door shows, beside those called like a password; commas in a variable."""
    heartbeat_interval: Duration = "30s"
    heartbeat_timeout: Duration = "5m"
    """Of workers over HTTP that ask for nothing else. None may ask for more."""
    reap: bool = True
    """Keep watch over workers from here too; where only foreign workers are, nobody else does."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"http host must be an address, not {self.host!r}.")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"http port must be 0 to 65535, not {self.port!r}.")
        object.__setattr__(self, "allowed_hosts", _names(self.allowed_hosts))
        object.__setattr__(self, "redact", _names(self.redact))
        if self.token is not None:
            _check_token(self.token)
        if not isinstance(self.secure_cookies, bool):
            raise ConfigError(f"http secure_cookies must be true or false, not {self.secure_cookies!r}.")
        for name, least in (
            ("max_body_bytes", 1024),
            ("requests_per_second", 0),
            ("max_open_requests", 1),
            ("max_open_requests_per_caller", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"http {name} must be a whole number of at least {least}, not {value!r}.")
        if not isinstance(self.reap, bool):
            raise ConfigError(f"http reap must be true or false, not {self.reap!r}.")
        for name in ("head_timeout", "body_timeout", "unread_timeout"):
            value = getattr(self, name)
            if not LEAST_CLIENT_TIMEOUT_S <= seconds(value, f"http {name}") <= MAX_CLIENT_TIMEOUT_S:
                raise ConfigError(f"http {name} must be between 100ms and 1h, not {value!r}.")
        check_heartbeat("HTTP", self.heartbeat_interval_s, self.heartbeat_timeout_s)

    @property
    def heartbeat_interval_s(self) -> float:
        return seconds(self.heartbeat_interval, "http heartbeat_interval")

    @property
    def heartbeat_timeout_s(self) -> float:
        return seconds(self.heartbeat_timeout, "http heartbeat_timeout")

    @property
    def head_timeout_s(self) -> float:
        return seconds(self.head_timeout, "http head_timeout")

    @property
    def body_timeout_s(self) -> float:
        return seconds(self.body_timeout, "http body_timeout")

    @property
    def unread_timeout_s(self) -> float:
        return seconds(self.unread_timeout, "http unread_timeout")


def _check_token(token: str) -> None:
    plain = isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token
    if not plain or not LEAST_GIVEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        # Never say what it is: this ends up in logs.
        raise ConfigError(
            f"http token must be {LEAST_GIVEN_CHARS} to {MAX_TOKEN_CHARS} plain characters without spaces. "
            "Make one with `openssl rand -hex 32`."
        )


def _names(given: tuple[str, ...] | str) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip().lower() for name in names if name.strip())


DEFAULT_BIND = "tcp://127.0.0.1:5555"
SCHEMES = ("tcp", "ipc")


@settings_class
@dataclass(frozen=True)
class MdpSettings:
    bind: str = DEFAULT_BIND
    """Port 0 (or `*`) takes a free one and says which. Beyond this machine it needs CURVE, or `insecure`."""
    heartbeat_interval: Duration = "2.5s"
    heartbeat_timeout: Duration = "7.5s"
    """An idle worker that is silent for so long is dead."""
    busy_timeout: Duration = "5m"
    """The same for one that works: many can not say a word meanwhile. A death that its connection shows is seen at
    once."""
    request_ttl: Duration = "1h"
    """A request that nobody took for so long expires."""
    notify_worker_crash: bool = True
    notify_no_workers: bool = True
    retry_attempts: int = 3
    """How often a crash sends a request of a bare service back to its queue; a task has rules of its own."""
    crash_notification_delay_ms: int = 0
    """So long deaths wait for others before clients are told."""
    max_message_bytes: int = 8 * 1024 * 1024
    max_frames: int = 1000
    max_requests_per_client: int = 10_000
    """That were taken and not answered."""
    max_memory_bytes: int = 1024 * 1024 * 1024
    """Of the broker's process: above it the socket is closed and opened again, which frees what nobody can take."""
    handshake_timeout: Duration = "5s"
    insecure: bool = False
    """Listen beyond this machine without CURVE: everybody who reaches the port may call and serve."""
    curve_secret_file: str = ""
    """The broker's own key, made by `unstuck keygen`; empty: no CURVE."""
    curve_clients_dir: str = ""
    """Public keys of those who may come in, one file each."""
    reap: bool = True
    """Keep watch over workers from here too."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.bind) if isinstance(self.bind, str) else None
        if parts is None or parts.scheme not in SCHEMES:
            raise ConfigError(f"mdp bind must be like {DEFAULT_BIND} or ipc:///run/unstuck.sock, not {self.bind!r}.")
        for name in ("heartbeat_interval", "heartbeat_timeout", "busy_timeout", "request_ttl", "handshake_timeout"):
            if seconds(getattr(self, name), f"mdp {name}") <= 0:
                raise ConfigError(f"mdp {name} must be above zero.")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "mdp heartbeat_timeout must be at least twice the heartbeat_interval: one beat may be lost."
            )
        if self.busy_timeout_s < self.heartbeat_timeout_s:
            raise ConfigError("mdp busy_timeout must be at least as long as heartbeat_timeout.")
        for name, least in (
            ("retry_attempts", 0),
            ("crash_notification_delay_ms", 0),
            ("max_message_bytes", 1024),
            ("max_frames", 8),
            ("max_requests_per_client", 1),
            ("max_memory_bytes", 1024 * 1024),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"mdp {name} must be a whole number of at least {least}, not {value!r}.")
        for name in ("notify_worker_crash", "notify_no_workers", "insecure", "reap"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"mdp {name} must be true or false, not {getattr(self, name)!r}.")

    @property
    def heartbeat_interval_s(self) -> float:
        return seconds(self.heartbeat_interval)

    @property
    def heartbeat_timeout_s(self) -> float:
        return seconds(self.heartbeat_timeout)

    @property
    def busy_timeout_s(self) -> float:
        return seconds(self.busy_timeout)

    @property
    def request_ttl_s(self) -> float:
        return seconds(self.request_ttl)

    @property
    def handshake_timeout_s(self) -> float:
        return seconds(self.handshake_timeout)


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
    failure_rate: float = 0.2
    """Share of failed jobs, from 0 to 1, from which on a task is failing: for alerts, the doctor, health and the
    dashboard."""

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
