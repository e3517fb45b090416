"""Webhooks are signed, sent within the timeout over verified TLS, and follow no redirect."""

import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.webhook_receiver import SECRET, receiving

from unstuck.config import Alerts
from unstuck.errors import ConfigError
from unstuck.notify.alerts import webhook
from unstuck.notify.alerts.targets import Delivered, NotDelivered, Outcome, Target, read_targets

PATIENCE_S = 30.0


def target_of(url: str, secret: str = SECRET) -> Target:
    [target] = read_targets(Alerts(targets=url, webhook_secret=secret))
    return target


def post(url: str, **changes: Any) -> Outcome:
    return webhook.post(target_of(url), {"title": "t"}, "d1", **{"timeout_s": PATIENCE_S, **changes})


def test_a_message_is_signed_over_its_time_and_body() -> None:
    with receiving() as receiver:
        assert post(receiver.url) == Delivered()
        [got] = receiver.posts
    assert got.is_signed()
    assert not got.is_signed("another-secret-of-this-test")
    assert (got.delivery, got.body["delivery"], got.body["title"]) == ("d1", "d1", "t")
    assert got.path == "/hook/token-in-the-path"
    assert got.headers["Host"] == f"127.0.0.1:{receiver.port}"


def test_the_secret_in_the_url_wins_and_is_not_sent() -> None:
    with receiving() as receiver:
        assert post(receiver.url.replace("127", ":own-secret-of-this-hook@127", 1)) == Delivered()
        [got] = receiver.posts
    assert got.is_signed("own-secret-of-this-hook")
    assert "own-secret" not in str(got.headers)


def test_redirects_are_not_followed() -> None:
    with receiving() as inner, receiving() as receiver:
        receiver.status, receiver.location = 302, inner.url
        outcome = post(receiver.url)
        assert isinstance(outcome, NotDelivered)
        assert "redirects are not followed" in outcome.reason
        assert (len(receiver.posts), inner.posts) == (1, [])


@pytest.mark.parametrize("how", ["hangs", "drips"])
def test_a_receiver_that_never_ends_its_answer_is_left_in_time(how: str) -> None:
    with receiving() as receiver:
        setattr(receiver, how, True)
        began_s = time.monotonic()
        outcome = post(receiver.url, timeout_s=0.5)
        assert time.monotonic() - began_s < PATIENCE_S
        assert outcome == NotDelivered("it did not answer within 0.5s", maybe_arrived=True)


def test_a_refusal_is_told_by_its_number() -> None:
    with receiving() as receiver:
        receiver.status = 500
        assert post(receiver.url) == NotDelivered("it answered 500", maybe_arrived=True)
        receiver.status = 404
        assert post(receiver.url) == NotDelivered("it answered 404")


def test_nobody_there_is_certainly_not_told() -> None:
    with receiving() as receiver:
        url = receiver.url
    outcome = post(url)
    assert isinstance(outcome, NotDelivered)
    assert not outcome.maybe_arrived
    assert "token-in-the-path" not in outcome.reason


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by no known authority."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    return server


def test_the_certificate_is_verified_against_the_name_in_the_url(
    certificate: tuple[Path, Path], secure: ssl.SSLContext
) -> None:
    names: list[str] = []
    secure.sni_callback = lambda _socket, name, _context: names.append(name)
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    with receiving(secure) as receiver:
        url = f"https://localhost:{receiver.port}/x"
        assert post(url, trust=trust) == Delivered()
        assert names == ["localhost"]
        outcome = post(f"https://127.0.0.1:{receiver.port}/x", trust=trust)
        assert isinstance(outcome, NotDelivered)
        assert "certificate" in outcome.reason
        # The machine's own authorities do not know it.
        outcome = post(url)
        assert isinstance(outcome, NotDelivered)
        assert "certificate" in outcome.reason
        assert len(receiver.posts) == 1


def test_a_webhook_without_a_secret_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"set alerts\.webhook_secret"):
        read_targets(Alerts(targets="https://hooks.example.com/services/TOKEN"))


def test_a_target_is_shown_without_its_secrets_and_keeps_its_place_when_the_secret_changes() -> None:
    rules = Alerts(targets=("https://:first-secret-of-two@h.example/T0KEN?k=v", "tgram://b0ttoken/chat"))
    hook, telegram = read_targets(rules)
    assert (hook.shown, telegram.shown[:9]) == ("https://h.example/…", "tgram://…")
    again = target_of("https://h.example/T0KEN?k=v", "another-secret-of-two")
    assert again.fingerprint == hook.fingerprint
    for text in (repr(rules), repr(hook), str(hook), repr(telegram), f"{[hook, telegram]}"):
        assert not any(secret in text for secret in ("first-secret", "T0KEN", "b0ttoken", "chat"))
