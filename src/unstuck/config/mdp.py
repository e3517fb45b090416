"""The ZeroMQ door: where the broker listens, whom it tells of what, and what peers may do."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import settings_class

DEFAULT_BIND = "tcp://127.0.0.1:5555"
SCHEMES = ("tcp", "ipc")


@settings_class
@dataclass(frozen=True)
class Mdp:
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
