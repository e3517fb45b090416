"""Nothing of a killed family stays behind in shared memory, and nothing of the living is removed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet
from tests.elsewhere import Place, can_enter
from tests.fleet import Fleet, wait_for

from unstuck.domain.states import JobState
from unstuck.reaper.shared_memory import OTHERS_KEPT_S, remove_leftovers
from unstuck.runner.last_words import WordsFile, read_words, words_path
from unstuck.runner.trace import Trace, trace_path

AWAY = Place(host="unstuck-away")
needs_hosts = pytest.mark.skipif(not can_enter(AWAY), reason="needs root to give a process another host name")
QUICK = {"heartbeat_interval": "200ms", "heartbeat_timeout": "1s"}


@needs_hosts
def test_a_family_killed_alone_on_its_host_leaves_nothing_once_something_starts_there(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**QUICK)
    survivor = fleet.start()
    victim = fleet.start(place=AWAY)
    page = trace_path(victim.id)
    assert page.exists()
    fleet.ledger.disable(survivor.id, "the job is for the other one", "test")
    job, _ = fleet.begin("talk", 600.0)
    wait_for(lambda: has_spoken(victim.id), "its last words to be where others can read them")
    victim.kill_family()
    # The one who settles it is on another host, and may not touch what is there.
    fleet.wait_state(job, JobState.FAILED)
    assert page.exists()
    [death] = fleet.ledger.attempts(job.id)
    assert death.autopsy is not None
    assert "no worker was left on host unstuck-away" in death.autopsy.missing
    assert death.autopsy.missing in str(fleet.app.operator.why(job.id)), "the report says what is missing, and why"
    after = fleet.start(place=AWAY)
    wait_for(lambda: not page.exists(), "the page of the dead removed")
    assert not words_path(page).exists()
    [death] = fleet.ledger.attempts(job.id)
    assert death.autopsy is not None
    assert (death.autopsy.stdout, death.autopsy.missing) == ("the last line of stdout", "")
    assert death.autopsy.progress is not None
    assert death.autopsy.progress.done == 137
    assert trace_path(after.id).exists()
    assert trace_path(survivor.id).exists()


def test_a_worker_killed_before_it_had_registered_leaves_nothing(fleet: Fleet, tmp_path: Path) -> None:
    page = _made_by_a_killed_process(tmp_path / "unstuck-never", fleet.ledger.ledger_id())
    assert WordsFile.create(words_path(page), 2) is not None
    assert WordsFile.create(tmp_path / "unstuck_words-orphan", 2) is not None
    assert remove_leftovers(fleet.ledger, tmp_path) == 1
    assert list(tmp_path.glob("unstuck*")) == []


def has_spoken(worker_id: str) -> bool:
    """Return whether all that `talk` says is where others can read it."""
    found = list((read_words(words_path(trace_path(worker_id))) or {}).values())
    return any(words.stdout and words.stderr and words.progress for words in found)


def test_what_a_job_said_last_is_kept_though_its_whole_worker_is_killed(fleet: Fleet) -> None:
    """Once beside a neighbour, and once with nobody left on the host until another worker starts."""
    for alone in (False, True):
        victim = fleet.start("--concurrency", "1")
        job, _ = fleet.begin("talk", 600.0)
        wait_for(lambda victim=victim: has_spoken(victim.id), "its last words to be where others can read them")
        page = trace_path(victim.id)
        if not alone:
            fleet.start("--concurrency", "1")
        victim.kill_family()
        if alone:
            for other in fleet.workers:
                other.kill_family()
            fleet.start("--concurrency", "1")
        fleet.wait_state(job, JobState.FAILED)
        [death] = fleet.ledger.attempts(job.id)
        assert death.autopsy is not None
        assert (death.autopsy.stdout, death.autopsy.stderr) == ("the last line of stdout", "the last line of stderr")
        assert death.autopsy.progress is not None
        assert (death.autopsy.progress.done, death.autopsy.progress.message) == (137, "nearly done")
        assert [one.stdout for one in fleet.app.operator.outputs(job.id)] == [b"the last line of stdout"]
        story = str(fleet.app.operator.why(job.id))
        assert "137 of 150 (91%)" in story
        assert "the last line of stderr" in story
        wait_for(lambda page=page: not page.exists() and not words_path(page).exists(), "the files of the dead removed")
        for other in fleet.workers:
            other.kill_family()


MAKER = """
import sys, time
from pathlib import Path
from unstuck.runner.trace import Trace
page = Trace.create(Path(sys.argv[1]), 2, sys.argv[2])
print("made", flush=True)
time.sleep(600)
"""


def _maker(path: Path, ledger_id: str) -> subprocess.Popen[str]:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(path), ledger_id], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "made\n"
    maker.stdout.close()
    return maker


def _made_by_a_killed_process(path: Path, ledger_id: str) -> Path:
    maker = _maker(path, ledger_id)
    maker.kill()
    maker.wait()
    return path


def test_only_what_is_certainly_ours_and_dead_is_removed(fleet: Fleet, tmp_path: Path) -> None:
    ledger_id = fleet.ledger.ledger_id()
    other_ledger = _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")
    strange = tmp_path / "unstuck-notes.txt"
    strange.write_text("Dear diary, " * 50)
    linked = tmp_path / "unstuck-link"
    linked.symlink_to(other_ledger)
    alive = _maker(tmp_path / "unstuck-alive", ledger_id)
    try:
        assert remove_leftovers(fleet.ledger, tmp_path) == 0
        # A stopped process is no dead one.
        alive.send_signal(signal.SIGSTOP)
        assert remove_leftovers(fleet.ledger, tmp_path) == 0
    finally:
        alive.kill()
        alive.wait()
    assert remove_leftovers(fleet.ledger, tmp_path) == 1
    assert {path.name for path in tmp_path.glob("unstuck-*")} == {"unstuck-other", "unstuck-notes.txt", "unstuck-link"}


def test_the_page_stays_while_a_job_of_the_dead_is_not_settled(fleet: Fleet) -> None:
    worker = fleet.start(UNSTUCK_EVIDENCE="none")
    fleet.begin("nap", 600.0)
    page = trace_path(worker.id)
    worker.kill_family()
    # It says which jobs had begun: whoever settles them needs it.
    remove_leftovers(fleet.ledger)
    assert page.exists()


def test_the_page_stays_while_a_child_of_the_worker_lives_by_it(tmp_path: Path) -> None:
    page = Trace.create(tmp_path / "unstuck-parent", 2, "x")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    page.close()
    try:
        assert Trace.open_abandoned(page.path) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = Trace.open_abandoned(page.path)
    assert found is not None
    assert found.ledger_id() == "x"
    found.close()


def test_a_look_at_the_page_of_another_ledger_never_locks_it(tmp_path: Path) -> None:
    """Its own reaper may look at the same moment, and would take the lock for a sign of life."""
    path = _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")

    def another_looks(page: Trace) -> bool:
        found = Trace.open_abandoned(path)
        assert found is not None
        found.close()
        return False

    assert Trace.open_abandoned(path, another_looks) is None


def test_pages_of_a_ledger_that_nobody_uses_any_more_go_after_a_while(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")
    from unstuck.reaper import shared_memory

    now = shared_memory.time.time
    monkeypatch.setattr(shared_memory.time, "time", lambda: now() + OTHERS_KEPT_S + 1)
    assert remove_leftovers(fleet.ledger, tmp_path) == 1
