"""Tell somebody through Apprise, which knows a hundred services. It is an extra, and it must not say what it knows."""

import logging
import re
import threading
from typing import Any

from unstuck.domain.errors import ConfigError
from unstuck.notify.alerts.message import Message
from unstuck.notify.alerts.outcomes import Arrived, Lost, Outcome
from unstuck.notify.alerts.targets import Target

CURE = "Alert targets other than webhooks need another package: pip install 'unstuck[alerts]'."
TALKATIVE = ("apprise", "urllib3.connectionpool", "requests")
"""What these write down while they send holds whole addresses, with their tokens."""

_STATUS = re.compile(r"error=(\d{3})\b")
_mine = threading.local()


def check_apprise(target: Target) -> None:
    """Raise ConfigError where this cannot be sent to: the package is missing, or it does not know the service."""
    if _plugin(target) is None:
        raise ConfigError(
            f"Apprise does not understand the alert target {target.shown}. Check its URL against the service's page of "
            "the Apprise documentation."
        )


def send(target: Target, message: Message) -> Outcome:
    """Send one message; takes as long as the service does, so whoever calls must not wait for it."""
    said: list[str] = []
    _mine.said = said
    try:
        plugin = _plugin(target)
        if plugin is None:
            return Lost("Apprise does not understand it")
        arrived = plugin.notify(body=message.text, title=message.title, notify_type=_kind())
    except ConfigError as error:
        return Lost(str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and its words may hold the address
        return Lost(f"Apprise failed with {type(error).__name__}", maybe_arrived=True)
    finally:
        _mine.said = None
    if arrived:
        return Arrived()
    status = next((found[1] for line in said if (found := _STATUS.search(line))), None)
    return Lost("the service did not take it" if status is None else f"the service answered {status}")


def _plugin(target: Target) -> Any:
    apprise = _load()
    before, _mine.said = getattr(_mine, "said", None), getattr(_mine, "said", None) or []
    try:
        return apprise.Apprise.instantiate(target.url, suppress_exceptions=True)
    finally:
        _mine.said = before


def _kind() -> Any:
    return _load().NotifyType.WARNING


def _load() -> Any:
    try:
        import apprise
    except ModuleNotFoundError as error:
        raise ConfigError(CURE) from error
    for name in TALKATIVE:
        logger = logging.getLogger(name)
        if _hush not in logger.filters:
            logger.addFilter(_hush)
    return apprise


class _Hush(logging.Filter):
    """Keep what is said in our own sending threads to ourselves; of others' use of Apprise nothing is changed."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = getattr(_mine, "said", None)
        if said is None:
            return True
        said.append(record.getMessage())
        return False


_hush = _Hush()
