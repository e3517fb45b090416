"""The web door: where it listens, whom it lets in, and the defaults of workers that come through it."""

from dataclasses import dataclass, field

from unstuck.domain.api_tokens import LEAST_GIVEN_CHARS, MAX_TOKEN_CHARS
from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import settings_class
from unstuck.domain.policy import check_heartbeat

DEFAULT_PORT = 8642


@settings_class
@dataclass(frozen=True)
class Web:
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
    redact: tuple[str, ...] | str = ()
    """Arguments whose values no door shows, beside those called like a password; commas in a variable."""
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
        object.__setattr__(self, "allowed_hosts", _names(self.allowed_hosts))
        object.__setattr__(self, "redact", _names(self.redact))
        if self.token is not None:
            _check_token(self.token)
        if not isinstance(self.secure_cookies, bool):
            raise ConfigError(f"web secure_cookies must be true or false, not {self.secure_cookies!r}.")
        for name, least in (
            ("max_body_bytes", 1024),
            ("requests_per_second", 0),
            ("max_open_requests", 1),
            ("max_open_requests_per_caller", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"web {name} must be a whole number of at least {least}, not {value!r}.")
        if not isinstance(self.reap, bool):
            raise ConfigError(f"web reap must be true or false, not {self.reap!r}.")
        check_heartbeat("Web", self.heartbeat_interval_s, self.heartbeat_timeout_s)

    @property
    def heartbeat_interval_s(self) -> float:
        return seconds(self.heartbeat_interval, "web heartbeat_interval")

    @property
    def heartbeat_timeout_s(self) -> float:
        return seconds(self.heartbeat_timeout, "web heartbeat_timeout")


def _check_token(token: str) -> None:
    plain = isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token
    if not plain or not LEAST_GIVEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        # Never say what it is: this ends up in logs.
        raise ConfigError(
            f"web token must be {LEAST_GIVEN_CHARS} to {MAX_TOKEN_CHARS} plain characters without spaces. "
            "Make one with `openssl rand -hex 32`."
        )


def _names(given: tuple[str, ...] | str) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip().lower() for name in names if name.strip())
