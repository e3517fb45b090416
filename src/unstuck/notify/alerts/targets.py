"""Targets of alerts: parse and check them, and deliver a message in a thread."""

import hashlib
import logging
import queue
import re
import secrets
import threading
import time
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from unstuck.config import Alerts
from unstuck.config.groups import WEBHOOK_SCHEMES
from unstuck.errors import ConfigError
from unstuck.notify.alerts.message import Message, test_message


class Delivered(msgspec.Struct, frozen=True):
    """The target said so."""


class NotDelivered(msgspec.Struct, frozen=True):
    """It did not, and why, in words without any secret."""

    reason: str
    maybe_arrived: bool = False
    """It had been sent: the answer may be all that is missing."""


Outcome = Delivered | NotDelivered


FINGERPRINT_CHARS = 32
LEAST_SECRET_CHARS = 16


class Target(msgspec.Struct, frozen=True):
    """One place to tell. Only `shown` and `fingerprint` may leave this room."""

    url: str
    secret: str
    shown: str
    fingerprint: str

    @property
    def is_webhook(self) -> bool:
        return urlsplit(self.url).scheme in WEBHOOK_SCHEMES

    def __repr__(self) -> str:
        return f"Target({self.shown})"

    __str__ = __repr__


def read_targets(rules: Alerts) -> list[Target]:
    """Give the targets of the settings; ConfigError where one cannot work as it is written."""
    targets = [_read(url, rules) for url in rules.targets]
    for target in targets:
        if target.is_webhook and len(target.secret) < LEAST_SECRET_CHARS:
            raise ConfigError(
                f"The webhook {target.shown} needs a secret of at least {LEAST_SECRET_CHARS} characters to be signed "
                "with: set alerts.webhook_secret (or $UNSTUCK_ALERTS_WEBHOOK_SECRET), or write it into the URL: "
                "https://:SECRET@host/path."
            )
    return targets


def _read(url: str, rules: Alerts) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in WEBHOOK_SCHEMES:
        mark = _fingerprint(url)
        # With Apprise the host, too, may be a token: nothing but the service is shown.
        return Target(url, "", f"{parts.scheme}://… ({mark[:6]})", mark)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    where = host if parts.port is None else f"{host}:{parts.port}"
    bare = urlunsplit((parts.scheme, where, parts.path or "/", parts.query, ""))
    own = unquote(parts.password or parts.username or "")
    # A new secret is no new target: it must not lose its place.
    return Target(bare, own or rules.webhook_secret, f"{parts.scheme}://{where}/…", _fingerprint(bare))


def _fingerprint(url: str) -> str:
    return hashlib.sha256(b"unstuck alert target\0" + url.encode()).hexdigest()[:FINGERPRINT_CHARS]


def usable_targets(rules: Alerts) -> list[Target]:
    """Give the targets; ConfigError where one of them can never be told.

    Loads what they need: that takes Apprise seconds, which are no time of any message."""
    targets = read_targets(rules)
    for target in targets:
        if not target.is_webhook:
            check_apprise(target)
    return targets


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
            return NotDelivered("Apprise does not understand it")
        arrived = plugin.notify(body=message.text, title=message.title, notify_type=_kind())
    except ConfigError as error:
        return NotDelivered(str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and its words may hold the address
        return NotDelivered(f"Apprise failed with {type(error).__name__}", maybe_arrived=True)
    finally:
        _mine.said = None
    if arrived:
        return Delivered()
    status = next((found[1] for line in said if (found := _STATUS.search(line))), None)
    return NotDelivered("the service did not take it" if status is None else f"the service answered {status}")


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


class DeliveryThread:
    """A try that is under way. Nobody waits for it longer than for its bound, whatever the target does."""

    def __init__(self, target: Target, message: Message, delivery: str, rules: Alerts) -> None:
        self.target = target
        self.delivery = delivery
        self._message = message
        self._rules = rules
        self._answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unstuck-alert-send", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Its thread has ended; while it has not, nothing else may be sent to this target from here."""
        return not self._thread.is_alive()

    def wait(self, patience_s: float) -> Outcome | None:
        """Give what became of it; None if that is not known yet."""
        try:
            return self._answers.get(timeout=patience_s) if patience_s > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        self._answers.put(deliver(self.target, self._message, self.delivery, self._rules))


def deliver(target: Target, message: Message, delivery: str, rules: Alerts) -> Outcome:
    try:
        if target.is_webhook:
            # With the first message: it brings HTTP and TLS, and most processes that could send never do.
            from unstuck.notify.alerts import webhook

            return webhook.post(target, message.facts, delivery, timeout_s=rules.send_timeout_s)
        return send(target, message)
    except Exception as error:  # noqa: BLE001 - one target's surprise must not keep the others from being told
        return NotDelivered(f"sending failed with {type(error).__name__}", maybe_arrived=True)


MARGIN_S = 1.0


class TestResult(msgspec.Struct, frozen=True):
    target: str
    arrived: bool
    why: str = ""


def send_test(rules: Alerts) -> list[TestResult]:
    sends = [DeliveryThread(target, test_message(), secrets.token_hex(16), rules) for target in usable_targets(rules)]
    deadline_s = time.monotonic() + rules.send_timeout_s + MARGIN_S
    trials = []
    for send in sends:
        outcome = send.wait(max(0.001, deadline_s - time.monotonic()))
        match outcome:
            case Delivered():
                trials.append(TestResult(send.target.shown, True))
            case NotDelivered(reason):
                trials.append(TestResult(send.target.shown, False, reason))
            case None:
                trials.append(TestResult(send.target.shown, False, f"no answer within {rules.send_timeout_s:g}s"))
    return trials
