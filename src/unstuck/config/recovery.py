"""How death is detected, what is done about it, and how long finished things are kept."""

from dataclasses import dataclass, field, fields

from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import did_you_mean, settings_class
from unstuck.domain.policy import check_heartbeat, check_runner_heartbeat
from unstuck.domain.rules import EVIDENCE, Kept, RecoveryRules


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
    starvation_after: Duration | None = "10m"
    """A job that waited for so long behind more urgent ones goes to the front of its queue; None: never."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_interval", "heartbeat_timeout", "runner_heartbeat_interval", "check_interval"):
            if seconds(getattr(self, name), name) <= 0:
                raise ConfigError(f"Recovery {name} must be above zero.")
        seconds(self.session_grace, "session_grace")
        # In a file or variable, which have no None: "none".
        if self.starvation_after in ("none", "off"):
            object.__setattr__(self, "starvation_after", None)
        if self.starvation_after is not None and seconds(self.starvation_after, "starvation_after") < 1:
            raise ConfigError("Recovery starvation_after must be at least one second, or None.")
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
    def starvation_after_s(self) -> float | None:
        return None if self.starvation_after is None else seconds(self.starvation_after, "starvation_after")

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
            starvation_after_s=self.starvation_after_s,
            kept=Kept(kept.jobs_s, kept.events_s, kept.workers_s, kept.audit_s),
        )
