"""Workers die, or none is there: new clients are told, old ones see their reply or silence, and the job is done."""

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.fleet import PATIENCE_S, wait_for
from tests.mdp.scene import Scene

from unstuck.domain.errors import CallFailed
from unstuck.domain.states import JobState

DIED = "Worker processing your job has crashed. Job will be retried."
DIED_FOR_GOOD = "Worker processing your job has crashed. Job will not be retried."
NOBODY = "No workers are currently available to process this job."
RETRIES = 3


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def check_notice(notice: dict[str, Any], error: str, message: str) -> None:
    assert {"error", "service", "message", "timestamp", "job_id", "ledger_id"} <= notice.keys()
    assert (notice["error"], notice["service"], notice["message"]) == (error, "echo", message)
    said_at = datetime.fromisoformat(notice["timestamp"])
    assert abs(datetime.now(UTC) - said_at) < timedelta(seconds=PATIENCE_S)


def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


# The first case: a crash is seen ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_client_is_told_of_the_crash_and_gets_its_reply_from_another_worker(
    scene: Scene, tmp_path: Path, kind: str
) -> None:
    more = ["--plain"] if kind == "plain" else []
    first = scene.worker("echo", *more)
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate(tmp_path)}".encode(), job_id="mine")
    kill(scene.wait_begun("job").pid)
    notice = client.next()
    check_notice(notice, "WORKER_CRASHED", DIED)
    job = scene.job()
    assert (notice["job_id"], notice["ledger_id"], notice["attempt"]) == ("mine", job.id, 1)
    assert "final" not in notice
    assert (job.state, job.crash_count) == (JobState.PENDING, 1)
    first.wait(PATIENCE_S)

    gate(tmp_path).touch()
    scene.worker("echo", *more)
    assert call.result() == [b"done job"]
    assert scene.times()["job"] == 2
    assert client.news.empty()


def test_an_old_client_sees_nothing_of_the_crash_but_its_reply(scene: Scene, tmp_path: Path) -> None:
    scene.worker("echo", "--plain")
    client = scene.plain_client("echo", f"job 0 {gate(tmp_path)}")
    kill(scene.wait_begun("job").pid)
    wait_for(lambda: scene.job().crash_count == 1, "the crash to be known")
    gate(tmp_path).touch()
    scene.worker("echo", "--plain")
    said, complaints = client.communicate(timeout=PATIENCE_S)
    assert (said.decode().strip(), client.returncode) == ("done job", 0), complaints
    assert scene.times()["job"] == 2


def test_after_the_last_retry_the_client_is_told_so_and_nothing_more(scene: Scene, tmp_path: Path) -> None:
    client = scene.client()
    scene.worker("echo")
    call = client.submit("echo", f"job 0 {gate(tmp_path)}".encode())
    for crash in range(1, RETRIES + 2):
        victim = scene.wait_begun("job", crash)
        # The next one stands ready, so that nobody is told that there is none.
        scene.worker("echo")
        kill(victim.pid)
        notice = client.next()
        last = crash > RETRIES
        check_notice(notice, "WORKER_CRASHED", DIED_FOR_GOOD if last else DIED)
        assert (notice["attempt"], notice.get("final", False)) == (crash, last)
    with pytest.raises(CallFailed) as caught:
        call.result()
    assert (caught.value.error, caught.value.ledger_id) == ("WORKER_CRASHED", scene.job().id)
    gate(tmp_path).touch()
    job = scene.job()
    assert (job.state, job.crash_count) == (JobState.QUARANTINED, RETRIES + 1)
    # What came later would stand behind this answer.
    assert client.call("echo", b"next") == [b"done next"]
    assert client.news.empty()
    assert scene.times()["job"] == RETRIES + 1


def test_an_old_client_whose_job_is_given_up_sees_silence(scene: Scene, tmp_path: Path) -> None:
    scene.worker("echo", "--plain")
    client = scene.plain_client("echo", f"job 0 {gate(tmp_path)}")
    for crash in range(1, RETRIES + 2):
        victim = scene.wait_begun("job", crash)
        scene.worker("echo", "--plain")
        kill(victim.pid)
    wait_for(lambda: scene.job().state is JobState.QUARANTINED, "the job to be given up")
    # A message of whatever kind would have ended it: it takes a reply, and anything else breaks it.
    with scene.client() as other:
        assert other.call("echo", b"next") == [b"done next"]
    assert client.poll() is None


def test_a_worker_that_is_only_busy_is_let_be(scene: Scene, tmp_path: Path) -> None:
    """It says nothing at all while it works, as old ones do."""
    scene.worker("echo", "--plain")
    client = scene.client()
    assert client.call("echo", b"job 9") == [b"done job"]
    assert client.news.empty()
    assert scene.times()["job"] == 1


# The second case: nobody is there ---------------------------------------------------------------


def test_a_client_is_told_at_once_that_nobody_is_there_and_then_a_worker_comes(scene: Scene) -> None:
    client = scene.client()
    call = client.submit("echo", b"job")
    notice = client.next()
    check_notice(notice, "NO_WORKERS", NOBODY)
    assert (notice["job_id"], notice["ledger_id"]) == (str(scene.job().id), scene.job().id)
    assert scene.job().state is JobState.PENDING
    scene.worker("echo")
    assert call.result() == [b"done job"]
    assert client.news.empty()
    assert scene.times()["job"] == 1


@pytest.mark.parametrize(("key", "times"), [("the-key", 1), (None, 2)])
def test_what_is_submitted_again_runs_once_with_a_key_and_twice_without(
    scene: Scene, key: str | None, times: int
) -> None:
    client = scene.client()
    first = client.submit("echo", b"job", idempotency_key=key)
    check_notice(client.next(), "NO_WORKERS", NOBODY)
    scene.worker("echo")
    again = client.submit("echo", b"job", idempotency_key=key)
    assert first.result() == again.result() == [b"done job"]
    third = client.call("echo", b"job", idempotency_key=key)
    assert third == [b"done job"]
    assert scene.times()["job"] == (1 if key else times + 1)
    assert len(scene.jobs()) == (1 if key else times + 1)


def test_an_old_client_waits_in_silence_until_a_worker_comes(scene: Scene) -> None:
    client = scene.plain_client("echo", "job")
    wait_for(lambda: scene.jobs(), "its request in the ledger")
    scene.worker("echo")
    said, complaints = client.communicate(timeout=PATIENCE_S)
    assert (said.decode().strip(), client.returncode) == ("done job", 0), complaints


def test_an_old_client_that_gives_up_and_asks_again_has_two_jobs(scene: Scene) -> None:
    client = scene.plain_client("echo", "job", timeout_s=0.7)
    said, complaints = client.communicate(timeout=PATIENCE_S)
    assert (said.decode().strip(), client.returncode) == ("silence", 0), complaints
    assert len(scene.jobs(JobState.PENDING)) == 3
    scene.worker("echo")
    wait_for(lambda: scene.times()["job"] == 3, "each to be done")


# The third case: a death after the first step -----------------------------------------------------


@pytest.mark.parametrize("who", ["new", "old"])
def test_a_job_whose_worker_died_after_its_first_step_begins_anew(scene: Scene, tmp_path: Path, who: str) -> None:
    scene.worker("echo")
    scene.worker("echo")
    words = f"steps 0.05 {gate(tmp_path)}"
    client = scene.client()
    old = scene.plain_client("echo", words) if who == "old" else None
    call = client.submit("echo", words.encode()) if who == "new" else None
    victim = scene.wait_begun("steps")
    kill(victim.pid)
    other = scene.wait_begun("steps", 2)
    assert other.pid != victim.pid
    gate(tmp_path).touch()
    if call is not None:
        check_notice(client.next(), "WORKER_CRASHED", DIED)
        assert call.result() == [b"done steps"]
    if old is not None:
        said, complaints = old.communicate(timeout=PATIENCE_S)
        assert (said.decode().strip(), old.returncode) == ("done steps", 0), complaints
    assert client.news.empty()
    assert [(work.pid, work.ended is None) for work in scene.done()] == [(victim.pid, True), (other.pid, False)]
