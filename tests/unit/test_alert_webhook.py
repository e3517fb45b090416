"""Webhooks go to the address that was checked, signed, within their time, and follow nobody."""

import socket
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
from unstuck.notify.alerts.addresses import Refused, is_public, resolve_once
from unstuck.notify.alerts.targets import Delivered, NotDelivered, Outcome, Target, read_targets

PATIENCE_S = 30.0


def target_of(url: str, secret: str = SECRET) -> Target:
    [target] = read_targets(Alerts(targets=url, webhook_secret=secret))
    return target


def post(url: str, **changes: Any) -> Outcome:
    options = {"timeout_s": PATIENCE_S, "allow_private": True, **changes}
    return webhook.post(target_of(url), {"title": "t"}, "d1", **options)


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


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0.0.0.0", "[::1]", "[::]"),
        *(
            "0",
            "0x7f000001",
            "017700000001",
            "\uff11\uff12\uff17.0.0.1",
            "127\u30020\u30020\u30021",
            "[::ffff:0:127.0.0.1]",
        ),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
    ],
)
def test_no_way_of_writing_this_machine_gets_through(host: str) -> None:
    with receiving() as receiver:
        outcome = post(f"http://{host}:{receiver.port}/", allow_private=False)
        assert isinstance(outcome, NotDelivered)
        assert "alerts.allow_private" in outcome.reason
        assert not outcome.maybe_arrived
        assert receiver.posts == []


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "224.0.0.1"),
        *("255.255.255.255", "0.0.0.0", "240.0.0.1", "168.63.129.16", "192.0.0.192", "127.0.0.53", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1"),
        *("fec0::1", "feff::1", "3fff::1", "3fff:fff::1", "5f00::1", "100::1", "2001:db8::1", "2001:20::1", "4000::1"),
        *("2002:a9fe:a9fe::", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_the_open_internet_is(address: str) -> None:
    assert is_public(address)


def fake_resolver(*answers: list[str]) -> Any:
    """Resolve to the next of these answers each time: a name server that changes its mind."""
    left = list(answers)

    def resolve(_host: str, port: int, **_: Any) -> list[Any]:
        addresses = left.pop(0)
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in addresses
        ]

    return resolve


def test_a_name_that_also_leads_inside_is_refused_whole() -> None:
    with pytest.raises(Refused):
        resolve_once("mixed", 80, allow_private=False, resolve=fake_resolver(["1.1.1.1", "10.0.0.1"]))


def test_a_name_is_asked_for_once_so_it_cannot_change_its_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setattr("unstuck.notify.alerts.addresses.is_public", lambda address: address == "127.0.0.1")
        resolve = fake_resolver(["127.0.0.1"], ["10.0.0.1"])

        def no_other_way(*_: Any, **__: Any) -> Any:
            raise AssertionError("the name was resolved again")

        monkeypatch.setattr(socket, "getaddrinfo", no_other_way)
        outcome = post(f"http://rebind.test:{receiver.port}/x", allow_private=False, resolve=resolve)
        assert outcome == Delivered()
        [got] = receiver.posts
    assert got.headers["Host"] == f"rebind.test:{receiver.port}"


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
    """A certificate for hooks.test alone, of nobody's authority but our own."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=hooks.test", "-addext", "subjectAltName=DNS:hooks.test"),
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


def test_tls_is_checked_against_the_name_though_we_connect_to_the_address(
    certificate: tuple[Path, Path], secure: ssl.SSLContext
) -> None:
    names: list[str] = []
    secure.sni_callback = lambda _socket, name, _context: names.append(name)
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    with receiving(secure) as receiver:
        resolve = fake_resolver(["127.0.0.1"])
        url = f"https://hooks.test:{receiver.port}/x"
        assert post(url, resolve=resolve, trust=trust) == Delivered()
        assert names == ["hooks.test"]
        wrong = f"https://other.test:{receiver.port}/x"
        outcome = post(wrong, resolve=fake_resolver(["127.0.0.1"]), trust=trust)
        assert isinstance(outcome, NotDelivered)
        assert "certificate" in outcome.reason
        # The machine's own authorities do not know it.
        outcome = post(url, resolve=fake_resolver(["127.0.0.1"]))
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
