"""The web door: where it listens, whom it lets in, and the defaults of workers that come through it."""

from dataclasses import dataclass

from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.policy import check_heartbeat

DEFAULT_PORT = 8642


@dataclass(frozen=True)
class Web:
    host: str = "127.0.0.1"
    """Any other address than this machine's own needs a token."""
    port: int = DEFAULT_PORT
    """0 takes a free one and says which."""
    allowed_hosts: tuple[str, ...] | str = ()
    """Names under which it may be asked for, beside the address that it listens on; commas in a variable."""
    heartbeat_interval: Duration = "30s"
    heartbeat_timeout: Duration = "5m"
    """Of workers over HTTP that ask for nothing else. None may ask for more."""
    reap: bool = True
    """Keep watch over workers from here too; where only foreign workers are, nobody else does."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"web host must be an address, not {self.host!r}.")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"web port must be 0 to 65535, not {self.port!r}.")
        given = self.allowed_hosts
        names = given.split(",") if isinstance(given, str) else given
        object.__setattr__(self, "allowed_hosts", tuple(name.strip().lower() for name in names if name.strip()))
        if not isinstance(self.reap, bool):
            raise ConfigError(f"web reap must be true or false, not {self.reap!r}.")
        check_heartbeat("Web", self.heartbeat_interval_s, self.heartbeat_timeout_s)

    @property
    def heartbeat_interval_s(self) -> float:
        return seconds(self.heartbeat_interval, "web heartbeat_interval")

    @property
    def heartbeat_timeout_s(self) -> float:
        return seconds(self.heartbeat_timeout, "web heartbeat_timeout")
