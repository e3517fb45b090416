"""Record how this process logs, compare it and restore it: commands and `logs.setup` change it for the process."""

import logging
import sys
from dataclasses import dataclass
from typing import Any, Self

OURS = "unstuck"
PYTEST = "_pytest."
"""Handlers from there come and go with each phase of a test."""
UNTOUCHED = (logging.NOTSET, False, True)

Flags = tuple[int, bool, bool]
"""Level, disabled, propagate."""


@dataclass(frozen=True)
class LogState:
    """How a process logs. Two states are equal if the same lines reach the same handlers."""

    root_level: int
    disabled_below: int
    handlers: tuple[logging.Handler, ...]
    loggers: dict[str, Flags]
    """Loggers of Unstuck with settings of their own."""
    captures_warnings: bool
    raises: bool
    structlog: dict[str, Any] | None
    """Configuration of structlog, if one was set."""

    @classmethod
    def now(cls) -> Self:
        flags = {one.name: (one.level, one.disabled, one.propagate) for one in _our_loggers()}
        return cls(
            root_level=logging.root.level,
            disabled_below=logging.root.manager.disable,
            handlers=tuple(one for one in logging.root.handlers if not _of_pytest(one)),
            loggers={name: state for name, state in flags.items() if state != UNTOUCHED},
            captures_warnings=_captures_warnings(),
            raises=logging.raiseExceptions,
            structlog=_structlog(),
        )

    def restore(self) -> None:
        """Make the process log as it did when this state was taken."""
        logging.root.setLevel(self.root_level)
        logging.disable(self.disabled_below)
        logging.root.handlers[:] = [*self.handlers, *(one for one in logging.root.handlers if _of_pytest(one))]
        for one in _our_loggers():
            level, one.disabled, one.propagate = self.loggers.get(one.name, UNTOUCHED)
            one.setLevel(level)
        logging.captureWarnings(self.captures_warnings)
        logging.raiseExceptions = self.raises
        if self.structlog != _structlog():
            _configure_structlog(self.structlog)


def _our_loggers() -> list[logging.Logger]:
    names = [name for name in logging.root.manager.loggerDict if name == OURS or name.startswith(f"{OURS}.")]
    return [logging.getLogger(name) for name in names]


def _of_pytest(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith(PYTEST)


def _captures_warnings() -> bool:
    # The standard library remembers here what it replaced, and says it nowhere else.
    return getattr(logging, "_warnings_showwarning") is not None  # noqa: B009 - types do not know the name


def _structlog() -> dict[str, Any] | None:
    # Loading it takes longer than most tests.
    if "structlog" not in sys.modules:
        return None
    # The statement waits for a thread that is still loading it; what `sys.modules` holds may be half of a module.
    import structlog

    return dict(structlog.get_config()) if structlog.is_configured() else None


def _configure_structlog(config: dict[str, Any] | None) -> None:
    import structlog

    structlog.reset_defaults()
    if config is not None:
        structlog.configure(**config)
