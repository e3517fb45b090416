"""Senders that die in the middle, whoever watches and sends, secrets that nobody may read: with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support import processes
from tests.support.fleet import ROOT, wait_for
from tests.support.http_server import serve
from tests.support.webhook_receiver import SECRET, Receiver, receiving

from unstuck.config import Alerts, Settings
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import ready_ledger
from unstuck.notify.alerts.delivery import TargetStatus, target_status

PATIENCE_S = 60.0
KILLED = -signal.SIGKILL


class Sender:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def said(self) -> str:
        return self.log.read_text(errors="replace")


RunSender = Callable[..., Sender]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    ledger = ready_ledger(Settings(url=url))
    yield ledger
    ledger.close()


@pytest.fixture
def environment(url: str, receiver: Receiver) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}
    return {
        **kept,
        "UNSTUCK_URL": url,
        "UNSTUCK_ALERTS_TARGETS": receiver.url,
        "UNSTUCK_ALERTS_WEBHOOK_SECRET": SECRET,
        "UNSTUCK_ALERTS_BATCH_WINDOW": "100ms",
        "UNSTUCK_ALERTS_MIN_INTERVAL": "0s",
        "UNSTUCK_ALERTS_SEND_TIMEOUT": "2s",
    }


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Iterator[RunSender]:
    """Run `unstuck alerts run`, or another command that sends; it ends with the test."""
    with ExitStack() as stack:

        def run(*command: str, **more: str) -> Sender:
            log = tmp_path / f"sender-{len(list(tmp_path.glob('sender-*')))}.log"
            with log.open("wb") as file:
                process = processes.start(
                    "unstuck.cli.main",
                    *(command or ("alerts", "run")),
                    cwd=ROOT,
                    env={**environment, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(lambda: process.poll() is None and process.send_signal(signal.SIGTERM))
            return Sender(process, log)

        yield run


def view(ledger: Ledger, receiver: Receiver) -> TargetStatus:
    rules = Alerts(targets=receiver.url, webhook_secret=SECRET)
    return target_status(ledger, rules)[0]


def tell(ledger: Ledger, message: str) -> None:
    ledger.events.write("crash_loop", message, about="host-1")


def meet(ledger: Ledger, receiver: Receiver) -> None:
    """Wait until a sender has met the target: from then on nothing is history."""
    wait_for(lambda: view(ledger, receiver).known, "a sender has met the target")


@pytest.mark.parametrize(("point", "posts"), [("alerts.after_send", 2), ("alerts.before_send", 1)])
def test_a_sender_killed_between_sending_and_writing_it_down_leaves_one_delivery(
    ledger: Ledger, run: RunSender, receiver: Receiver, point: str, posts: int
) -> None:
    first = run(UNSTUCK_FAILPOINTS=f"{point}=kill")
    meet(ledger, receiver)
    tell(ledger, "a loop")
    assert first.process.wait(PATIENCE_S) == KILLED
    assert len(receiver.posts) == posts - 1
    run()
    wait_for(lambda: len(receiver.posts) == posts, "the next sender tells it")
    wait_for(lambda: view(ledger, receiver).messages == 1, "it is written down")
    tell(ledger, "the end")
    wait_for(lambda: len(receiver.posts) == posts + 1, "the end")
    *before, last = receiver.posts
    assert {post.delivery for post in before} == {before[0].delivery}
    assert [post.body["repeated"] for post in before] == [False, True][2 - posts :]
    assert [alert["message"] for alert in before[-1].body["alerts"]] == ["a loop."]
    assert [alert["message"] for alert in last.body["alerts"]] == ["the end."]
    assert last.delivery != before[0].delivery


@pytest.mark.parametrize("command", ["reaper", "serve"])
def test_whoever_watches_sends_too(
    url: str, ledger: Ledger, run: RunSender, receiver: Receiver, environment: dict[str, str], command: str
) -> None:
    with ExitStack() as stack:
        if command == "serve":
            stack.enter_context(serve(url, env=environment))
        else:
            run(command)
        meet(ledger, receiver)
        tell(ledger, "a loop")
        wait_for(lambda: receiver.posts, "a message")
    assert receiver.posts[0].is_signed()


def test_secrets_are_in_no_log_and_not_in_the_ledger(
    url: str, ledger: Ledger, run: RunSender, receiver: Receiver, environment: dict[str, str], tmp_path: Path
) -> None:
    targets = f"{receiver.url} json://user:p4ssw0rd@127.0.0.1:{receiver.port}/4pprise-token"
    receiver.status = 403
    sender = run("--log-level", "debug", "alerts", "run", UNSTUCK_ALERTS_TARGETS=targets)
    meet(ledger, receiver)
    tell(ledger, "a loop")
    wait_for(lambda: sender.said().count("cannot be told") >= 2, "the failures are in its log")
    sender.process.send_signal(signal.SIGTERM)
    assert sender.process.wait(PATIENCE_S) == 0
    shown = subprocess.run(
        [sys.executable, "-m", "unstuck.cli.main", "--log-level", "debug", "alerts", "test"],
        cwd=ROOT,
        env={**environment, "UNSTUCK_ALERTS_TARGETS": targets},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 1
    assert "it answered 403" in shown.stdout
    assert "the service answered 403" in shown.stdout
    texts = [sender.said(), shown.stdout, shown.stderr]
    if url.startswith("sqlite"):
        texts += [path.read_bytes().decode("latin-1") for path in tmp_path.glob("jobs.db*") if path.is_file()]
    for text in texts:
        for secret in (SECRET, "token-in-the-path", "p4ssw0rd", "4pprise-token"):
            assert secret not in text
