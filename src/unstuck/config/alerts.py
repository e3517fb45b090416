"""Alerts: whom to tell, of what, and how often."""

from dataclasses import dataclass

from unstuck.domain.errors import ConfigError


@dataclass(frozen=True)
class Alerts:
    targets: tuple[str, ...] | str = ()
    """Apprise URLs, or https://… for a signed webhook; separated by spaces in a variable."""

    def __post_init__(self) -> None:
        given = self.targets
        if not isinstance(given, str | tuple | list):
            raise ConfigError(f"alerts targets must be a list of URLs, not {given!r}.")
        targets = given.split() if isinstance(given, str) else given
        object.__setattr__(self, "targets", tuple(target.strip() for target in targets if target.strip()))
