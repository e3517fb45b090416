"""A whole worker dies with its runners: by neighbours, by session, by lease, by supervisor."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, wait_for
from tests.support.hosts import Host, needs_other_hosts
from tests.support.signals import send_signal

from unstuck import WorkerCrashed
from unstuck.client.job import Job
from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.recovery.leftovers import OTHERS_KEPT_S, remove_leftovers
from unstuck.recovery.reap import Reaper
from unstuck.runner.last_output import LastOutputFile, last_output_path, read_last_output
from unstuck.runner.status_page import StatusPage, status_page_path

pytestmark = pytest.mark.both_databases


def detector_of(fleet: Fleet, worker_id: str) -> Detector:
    def look() -> Detector | None:
        worker = next(w for w in fleet.ledger.workers.list() if w.id == worker_id)
        return worker.verdict.detector if worker.state is WorkerState.DEAD and worker.verdict else None

    return wait_for(look, f"verdict on {worker_id}")


def start_victim(fleet: Fleet, task: str = "nap") -> tuple[str, Job]:
    """Start a worker of its own queue and wait until it is in a job; give its id and the job."""
    worker = fleet.start("--queues", "other", "--concurrency", "2")
    job, _ = fleet.begin(task, 60, "other")
    return worker.id, job


def test_a_neighbour_sees_the_death_before_any_lease_ends(fleet: Fleet) -> None:
    fleet.start("--queues", "default", "--concurrency", "2")
    worker_id, job = start_victim(fleet)
    fleet.task("add").enqueue_many([(n, n) for n in range(100)])
    fleet.workers[-1].kill_family()
    fleet.wait_final(job)
    assert detector_of(fleet, worker_id) is Detector.PEER
    with pytest.raises(WorkerCrashed, match="Worker died unexpectedly"):
        job.result(timeout=5)


def test_a_job_to_be_retried_goes_back_to_the_queue_and_one_crash_is_counted(fleet: Fleet) -> None:
    fleet.start("--queues", "default")
    worker_id, job = start_victim(fleet, "nap_again")
    fleet.workers[-1].kill()
    assert detector_of(fleet, worker_id) is Detector.PEER
    fleet.wait_state(job, JobState.PENDING)
    record = job.record()
    assert record.crash_count == 1
    assert record.failures == 0
    assert f"Task re-queued due to stale worker: {worker_id}" in fleet.ledger.events.list(job_id=job.id)[-1].message


def test_with_neighbours_blinded_the_lost_session_tells_before_any_lease_ends(make_fleet: MakeFleet, url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite has one host and no sessions")
    fleet = make_fleet(evidence="session")
    fleet.start("--queues", "default")
    _lose_one(fleet, Detector.SESSION)


def test_without_any_evidence_the_lease_tells(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(evidence="none", heartbeat_interval="0.5s", heartbeat_timeout="3s", check_interval="0.5s")
    fleet.start("--queues", "default")
    _lose_one(fleet, Detector.LEASE)


def _lose_one(fleet: Fleet, detector: Detector) -> None:
    worker_id, job = start_victim(fleet)
    fleet.workers[-1].kill_family()
    fleet.wait_final(job)
    assert detector_of(fleet, worker_id) is detector


def test_a_killed_job_with_a_policy_of_retry_runs_again_elsewhere(fleet: Fleet) -> None:
    fleet.start("--queues", "other,default")
    victim = fleet.start("--queues", "other")
    jobs = [fleet.task("nap_again").options(queue="other").enqueue(1) for _ in range(8)]
    for job in jobs[:2]:
        # On a busy machine a nap may be over before we look.
        fleet.wait_state(job, JobState.RUNNING, JobState.SUCCEEDED)
    victim.kill_family()
    for job in jobs:
        assert job.result(timeout=60) == "rested"


def test_the_last_worker_dies_and_the_next_one_settles_what_it_held(fleet: Fleet) -> None:
    worker = fleet.start()
    job = fleet.task("nap_again").enqueue(0.5)
    fleet.wait_running(job)
    worker.kill_family()
    fleet.start()
    assert job.result(timeout=30) == "rested"


CUTS = 2


class Foreign(Reaper):
    """A reaper that sees every worker as if on another host."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.ledger, Recovery(), by="far away")
        self.observer.on_this_host = lambda worker: False  # type: ignore[method-assign]


def test_a_living_worker_whose_session_is_cut_is_not_taken_for_dead(ready_pg_url: str, tmp_path: Path) -> None:
    fleet = Fleet(ready_pg_url, tmp_path)
    try:
        worker_id = fleet.start("--no-reaper").id
        reaper = Foreign(fleet)
        with psycopg.connect(ready_pg_url, autocommit=True) as admin:

            def session() -> int:
                row = admin.execute("select session_pid from unstuck.worker_watch where worker_id = %s", (worker_id,))
                [(pid,)] = row.fetchall()
                return int(pid)

            for _ in range(CUTS):
                before = session()
                admin.execute("select pg_terminate_backend(%s)", (before,))

                def back(before: int = before) -> bool:
                    reaper.sweep(ticket=False)
                    seen = next(seen for seen in fleet.ledger.recovery.watch() if seen.id == worker_id)
                    assert seen.state is not WorkerState.DEAD, "a living worker was taken for dead"
                    return session() != before and seen.state is WorkerState.ACTIVE

                wait_for(back, "the worker back with a new session")
    finally:
        fleet.close()


AWAY = Host(host="unstuck-away")
QUICK = {"heartbeat_interval": "200ms", "heartbeat_timeout": "1s"}


@needs_other_hosts
def test_a_family_killed_alone_on_its_host_leaves_nothing_once_something_starts_there(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**QUICK)
    survivor = fleet.start()
    victim = fleet.start(place=AWAY)
    page = status_page_path(victim.id)
    assert page.exists()
    fleet.ledger.workers.disable(survivor.id, "the job is for the other one", "test")
    job, _ = fleet.begin("talk", 600.0)
    wait_for(lambda: has_spoken(victim.id), "its last words to be where others can read them")
    victim.kill_family()
    # The one who settles it is on another host, and may not touch what is there.
    fleet.wait_state(job, JobState.FAILED)
    assert page.exists()
    [death] = fleet.ledger.jobs.attempts(job.id)
    assert death.autopsy is not None
    assert "no worker was left on host unstuck-away" in death.autopsy.missing
    assert death.autopsy.missing in str(fleet.app.operator.why(job.id)), "the report says what is missing, and why"
    after = fleet.start(place=AWAY)
    wait_for(lambda: not page.exists(), "the page of the dead removed")
    assert not last_output_path(page).exists()
    [death] = fleet.ledger.jobs.attempts(job.id)
    assert death.autopsy is not None
    assert (death.autopsy.stdout, death.autopsy.missing) == ("the last line of stdout", "")
    assert death.autopsy.progress is not None
    assert death.autopsy.progress.done == 137
    assert status_page_path(after.id).exists()
    assert status_page_path(survivor.id).exists()


def test_a_worker_killed_before_it_had_registered_leaves_nothing(fleet: Fleet, tmp_path: Path) -> None:
    page = _made_by_a_killed_process(tmp_path / "unstuck-never", fleet.ledger.ledger_id())
    assert LastOutputFile.create(last_output_path(page), 2) is not None
    assert LastOutputFile.create(tmp_path / "unstuck_words-orphan", 2) is not None
    assert remove_leftovers(fleet.ledger, tmp_path) == 1
    assert list(tmp_path.glob("unstuck*")) == []


def has_spoken(worker_id: str) -> bool:
    """Return whether all that `talk` says is where others can read it."""
    found = list((read_last_output(last_output_path(status_page_path(worker_id))) or {}).values())
    return any(words.stdout and words.stderr and words.progress for words in found)


def test_what_a_job_said_last_is_kept_though_its_whole_worker_is_killed(fleet: Fleet) -> None:
    """Once beside a neighbour, and once with nobody left on the host until another worker starts."""
    for alone in (False, True):
        victim = fleet.start("--concurrency", "1")
        job, _ = fleet.begin("talk", 600.0)
        wait_for(lambda victim=victim: has_spoken(victim.id), "its last words to be where others can read them")
        page = status_page_path(victim.id)
        if not alone:
            fleet.start("--concurrency", "1")
        victim.kill_family()
        if alone:
            for other in fleet.workers:
                other.kill_family()
            fleet.start("--concurrency", "1")
        fleet.wait_state(job, JobState.FAILED)
        [death] = fleet.ledger.jobs.attempts(job.id)
        assert death.autopsy is not None
        assert (death.autopsy.stdout, death.autopsy.stderr) == ("the last line of stdout", "the last line of stderr")
        assert death.autopsy.progress is not None
        assert (death.autopsy.progress.done, death.autopsy.progress.message) == (137, "nearly done")
        assert [one.stdout for one in fleet.app.operator.jobs.outputs(job.id)] == [b"the last line of stdout"]
        story = str(fleet.app.operator.why(job.id))
        assert "137 of 150 (91%)" in story
        assert "the last line of stderr" in story
        wait_for(
            lambda page=page: not page.exists() and not last_output_path(page).exists(), "the files of the dead removed"
        )
        for other in fleet.workers:
            other.kill_family()


MAKER = """
import sys, time
from pathlib import Path
from unstuck.runner.status_page import StatusPage
page = StatusPage.create(Path(sys.argv[1]), 2, sys.argv[2])
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
    page = status_page_path(worker.id)
    worker.kill_family()
    # It says which jobs had begun: whoever settles them needs it.
    remove_leftovers(fleet.ledger)
    assert page.exists()


def test_the_page_stays_while_a_child_of_the_worker_lives_by_it(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "unstuck-parent", 2, "x")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    page.close()
    try:
        assert StatusPage.open_abandoned(page.path) is None
    finally:
        send_signal(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = StatusPage.open_abandoned(page.path)
    assert found is not None
    assert found.ledger_id() == "x"
    found.close()


def test_a_look_at_the_page_of_another_ledger_never_locks_it(tmp_path: Path) -> None:
    """Its own reaper may look at the same moment, and would take the lock for a sign of life."""
    path = _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")

    def another_looks(page: StatusPage) -> bool:
        found = StatusPage.open_abandoned(path)
        assert found is not None
        found.close()
        return False

    assert StatusPage.open_abandoned(path, another_looks) is None


def test_a_page_that_another_process_removes_at_that_moment_is_no_trouble(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")

    def removed_meanwhile(page: StatusPage) -> str:
        path.unlink()
        return "0123456789abcdef"

    monkeypatch.setattr(StatusPage, "ledger_id", removed_meanwhile)
    assert remove_leftovers(fleet.ledger, tmp_path) == 0


def test_pages_of_a_ledger_that_nobody_uses_any_more_go_after_a_while(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made_by_a_killed_process(tmp_path / "unstuck-other", "0123456789abcdef")
    from unstuck.recovery import leftovers

    now = leftovers.time.time
    monkeypatch.setattr(leftovers.time, "time", lambda: now() + OTHERS_KEPT_S + 1)
    assert remove_leftovers(fleet.ledger, tmp_path) == 1
