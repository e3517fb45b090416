"""Alerts reach services of several kinds through Apprise: chat, push, and mail by a real conversation over SMTP."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage

import pytest
from tests.support.webhook_receiver import receiving

from unstuck.config import Alerts
from unstuck.notify.alerts import targets
from unstuck.notify.alerts.message import Message
from unstuck.notify.alerts.message import test_message as trial
from unstuck.notify.alerts.targets import Delivered, NotDelivered, Outcome, read_targets

# Apprise loads all of its services at once, and some of them are older than the Python that they run on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOKEN = "abcdefghijklmnopqrstuvwxyz0123"
SERVICES = {
    "gotify": "gotify://127.0.0.1:{port}/{token}",
    "ntfy": "ntfy://127.0.0.1:{port}/{token}",
    "mattermost": "mmost://127.0.0.1:{port}/{token}",
    "rocket.chat": "rocket://{token}/{token}@127.0.0.1:{port}/#ops",
    "form": "form://127.0.0.1:{port}/{token}",
    "xml": "xml://127.0.0.1:{port}/{token}",
}


def tell(url: str, message: Message) -> Outcome:
    [target] = read_targets(Alerts(targets=(url,)))
    assert TOKEN not in target.shown
    targets.check_apprise(target)
    return targets.send(target, message)


@pytest.mark.parametrize("url", SERVICES.values(), ids=SERVICES.keys())
def test_a_service_gets_the_words_of_the_message(url: str) -> None:
    message = trial()
    with receiving() as receiver:
        assert tell(url.format(port=receiver.port, token=TOKEN), message) == Delivered()
        [post] = receiver.posts[-1:]
    # A form writes spaces as plus.
    told = post.raw.decode().replace("+", " ")
    assert "Nothing is wrong" in message.text
    assert "Nothing is wrong" in told
    assert "this is a trial" in told or "this is a trial" in str(post.headers)


@pytest.mark.parametrize("url", SERVICES.values(), ids=SERVICES.keys())
def test_a_service_that_refuses_is_told_of_without_its_token(url: str) -> None:
    with receiving() as receiver:
        receiver.status = 500
        outcome = tell(url.format(port=receiver.port, token=TOKEN), trial())
    assert isinstance(outcome, NotDelivered)
    assert TOKEN not in str(outcome)


def test_mail_is_sent_to_whom_it_names() -> None:
    message = trial()
    with mailbox() as (port, letters):
        url = f"mailto://127.0.0.1:{port}?from=unstuck@example.org&to=ops@example.org&mode=insecure"
        assert tell(url, message) == Delivered()
    [letter] = letters
    assert letter["to"] == "ops@example.org"
    assert letter["subject"] == message.title
    body = letter.get_body(("plain", "html"))
    assert body is not None
    assert "Nothing is wrong" in body.get_content()


@contextmanager
def mailbox() -> Iterator[tuple[int, list[EmailMessage]]]:
    """Take mail as a server does; give its port and the letters."""
    letters: list[EmailMessage] = []

    class Conversation(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                verb = line[:4].upper().strip()
                if verb == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    letters.append(message_from_bytes(self._letter(), policy=policy.default))
                self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                if verb == b"QUIT":
                    return

        def _letter(self) -> bytes:
            return b"".join(iter(self.rfile.readline, b".\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Conversation) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], letters
        finally:
            server.shutdown()
