"""What people are told of a job in steps: by `why`, `job`, `doctor`, `jobs`, `signal`, in words and as JSON."""

import json
from typing import Any

import msgspec
import pytest
from tests.contract.hands import crash_retry, done, running, turn
from tests.contract.test_ledger_journal import again, entry, suspend

from unstuck import JobNotFound, SignalRefused
from unstuck.cli.main import main
from unstuck.client.operator import Operator
from unstuck.client.why.story import StepKind
from unstuck.config import Settings
from unstuck.store.contract import Ledger


@pytest.fixture
def waiting(ledger: Ledger, w1: str) -> int:
    """A job that did two steps, died, and waits for a signal."""
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1, b'{"paid":3}', name="charge")], endings=[crash_retry(job)])
    job = again(ledger)
    more = [entry(job, 2, name="pack"), entry(job, 0, b"[7]", name="checkpoint")]
    turn(
        ledger,
        entries=[*more, entry(job, 3, b"60.0", kind="wait", name="go now")],
        endings=[suspend(job, 60.0, "go now")],
    )
    return job.job_id


def test_why_tells_the_steps_and_what_it_waits_for(ledger: Ledger, url: str, waiting: int) -> None:
    operator = Operator(ledger, Settings(url=url))
    ledger.signal(waiting, "other", b"1", "ada")
    story = operator.why(waiting)
    assert story.headline == "It waits for signal 'go now'."
    told = [step.text for step in story.steps if step.kind is StepKind.STEP]
    assert told == [
        "Step 1, 'charge', is done and will not run again.",
        "Its last checkpoint was written.",
        "Step 2, 'pack', is done and will not run again.",
        "Began to wait for signal 'go now'.",
    ]
    texts = "\n".join(step.text for step in story.steps)
    assert "Try 2 gave its slot back" in texts
    assert "it waits for signal 'go now' for at most 60s." in texts
    assert "Signal 'other' was sent by ada" in texts
    assert "2 steps of it are done (charge, pack)." in story.next
    assert (f"unstuck signal {waiting} 'go now'", "sends what it waits for") in [
        (action.command, action.why) for action in story.actions
    ]


def test_the_doctor_says_how_to_send_it(ledger: Ledger, url: str, waiting: int) -> None:
    finding = Operator(ledger, Settings(url=url)).doctor_job(waiting)[0]
    assert (finding.code, finding.severity) == ("waiting", "info")
    assert finding.what.endswith("waits for signal 'go now'")
    assert "It waits for signal 'go now' since " in finding.why
    assert f"`unstuck signal {waiting} 'go now'` sends it" in finding.cure


def test_a_success_after_a_wait_is_no_success_after_trouble(ledger: Ledger, url: str, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[suspend(job, 0.0)])
    while not ledger.promote_due(1).count:
        pass
    turn(ledger, done=[done(again(ledger))])
    story = Operator(ledger, Settings(url=url)).why(job.job_id)
    assert story.headline.startswith("It succeeded, after")


@pytest.mark.usefixtures("restored_logging")
def test_the_commands(ledger: Ledger, url: str, waiting: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        assert main(["--url", url, *arguments]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    assert "waits for signal 'go now'" in run("jobs", "--state", "waiting")
    shown: dict[str, Any] = json.loads(run("job", str(waiting), "--json"))
    assert shown["awaits"] == "go now"
    assert [(one["seq"], one["kind"], one["name"], one["value"]) for one in shown["journal"]] == [
        (0, "checkpoint", "checkpoint", [7]),
        (1, "step", "charge", {"paid": 3}),
        (2, "step", "pack", 1),
        (3, "wait", "go now", 60.0),
    ]
    assert "charge" in run("job", str(waiting))
    assert "sends what it waits for" in run("why", str(waiting))
    assert "VALUE must be JSON" in run("signal", str(waiting), "go now", "{", code=2)
    assert json.loads(run("signal", str(waiting), "go now", '{"ok": true}', "--json"))["answer"] == "woken"
    assert "takes it when it comes to it" in run("signal", str(waiting), "go now")
    assert [msgspec.json.decode(one.value) for one in ledger.signals(waiting)] == [{"ok": True}, None]
    assert "does not exist" in run("signal", "999999", "x", code=1)
    assert ("signal", f"job {waiting}: go now") in [(one.verb, one.target) for one in ledger.audit(limit=10)]


def test_a_signal_that_nobody_can_take_is_refused_in_words(ledger: Ledger, url: str, w1: str) -> None:
    operator = Operator(ledger, Settings(url=url))
    job = running(ledger)
    turn(ledger, done=[done(job)])
    with pytest.raises(SignalRefused, match="has ended"):
        operator.signal(job.job_id, "x")
    with pytest.raises(JobNotFound):
        operator.signal(2**70, "x")
