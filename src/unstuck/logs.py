"""Say what happens, to stderr, as lines for people or as JSON for machines; never to stdout.

Every module takes its logger from here. A logger hands plain records to the standard library's logging, so an
app that uses Unstuck keeps its own set-up; only Unstuck's own processes call `setup`.
"""

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

from unstuck.domain.terminal import harmless, harmless_json
from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")

# Fields of a standard log record that must not be overwritten by ours.
_TAKEN = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime"})


def logger(name: str) -> Any:
    """Give a logger that takes facts as keywords: `log.warning("Dead worker detected: w1", worker="w1")`."""
    return _Logger(name)


class _Logger:
    """Write lines with the standard library alone.

    A line must not import anything: it is often the first word about a process that has run out of file descriptors, or
    whose packages are being replaced."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, message: str, /, **facts: Any) -> None:
        self._log(logging.DEBUG, message, facts)

    def info(self, message: str, /, **facts: Any) -> None:
        self._log(logging.INFO, message, facts)

    def warning(self, message: str, /, **facts: Any) -> None:
        self._log(logging.WARNING, message, facts)

    def error(self, message: str, /, **facts: Any) -> None:
        self._log(logging.ERROR, message, facts)

    def exception(self, message: str, /, **facts: Any) -> None:
        self._log(logging.ERROR, message, {"exc_info": True, **facts})

    def _log(self, level: int, message: str, facts: dict[str, Any]) -> None:
        # Created with its first line: `logging.config` disables the loggers that exist when an app sets up its own.
        target = logging.getLogger(self._name)
        if target.isEnabledFor(level):
            target.log(level, **_record(message, {"stacklevel": 3, **facts}))


def setup(level: str = "info", format: str = "console", stream: TextIO | None = None) -> None:
    """Send every log of this process, ours and that of other libraries, to stderr (or `stream`)."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"Log level must be one of {', '.join(LEVELS)}, not {level!r}.{did_you_mean(level, LEVELS)}")
    if format not in FORMATS:
        raise ConfigError(f"Log format must be console or json, not {format!r}.{did_you_mean(format, FORMATS)}")
    import structlog

    target = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso" if format == "json" else "%H:%M:%S.%f", utc=format == "json"),
    ]
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderer(format, target)],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    # What other libraries whisper is of interest only to those who asked for everything.
    root.setLevel(max(level_number(level), logging.WARNING) if level.lower() != "debug" else logging.DEBUG)
    logging.getLogger("unstuck").setLevel(level_number(level))
    logging.captureWarnings(True)
    # A log that cannot be written must not end a worker.
    logging.raiseExceptions = False
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def level_number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _renderer(format: str, target: TextIO) -> list[Any]:
    import structlog

    if format == "json":
        return [
            # As text: the structured form would write the values of local variables down, secrets included.
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(_json, default=str),
        ]
    return [
        _milliseconds,
        # As text before it is made harmless: the message of an exception may hold anything.
        structlog.processors.format_exc_info,
        _harmless,
        structlog.dev.ConsoleRenderer(
            colors=target.isatty(),
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,
            timestamp_key="timestamp",
        ),
    ]


def _json(value: Any, **options: Any) -> str:
    return harmless_json(json.dumps(value, ensure_ascii=False, **options))


def _harmless(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Make whatever others wrote harmless: a log on a terminal must not be obeyed."""
    return {
        harmless(key): harmless(value if isinstance(value, str) else str(value)) if _is_foreign(value) else value
        for key, value in event.items()
    }


def _is_foreign(value: Any) -> bool:
    return not isinstance(value, int | float | None)


def _milliseconds(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    event["timestamp"] = event["timestamp"][:-3]
    return event


def _to_record(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return _record(event.pop("event"), event)


def _record(message: str, facts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return what the standard library's logging is called with."""
    standard = {key: facts.pop(key) for key in ("exc_info", "stack_info", "stacklevel") if key in facts}
    extra = {f"{key}_" if key in _TAKEN else key: value for key, value in facts.items()}
    # The percent sign of a message is only a percent sign: arguments are never given.
    return {"msg": message, "extra": extra, **standard}
