"""What does not die but hangs: it is ended by its worker, with its stack, and nobody else is touched."""

import os
import time
from pathlib import Path

import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import PROMPT, Fleet, wait_for, wait_heartbeats
from tests.support.signals import OwnProcess

from unstuck import DeadlineExceeded, JobCancelled, JobQuarantined, OutOfMemory, Stalled, WorkerCrashed
from unstuck.client.job import Job
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.states import AttemptState, JobState

MOST_S = 60.0
LEASE_S = 30.0
SEVERAL_SWEEPS = 4
"""After this many heartbeats of every worker, each reaper has looked several times."""


def last_autopsy(fleet: Fleet, job_id: int) -> Autopsy:
    autopsy = fleet.ledger.jobs.attempts(job_id)[-1].autopsy
    assert autopsy is not None
    return autopsy


def test_whatever_hangs_past_its_deadline_is_ended_with_its_stack(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="0.5s")
    worker = fleet.start("--concurrency", "5")
    sibling, _ = fleet.begin("nap", 4.0)
    jobs = {how: fleet.task("hang").enqueue(how) for how in ("loop", "deadlock", "gil", "ignore")}
    for how, job in jobs.items():
        with pytest.raises(DeadlineExceeded) as caught:
            job.result(timeout=MOST_S)
        assert caught.value.code == "DEADLINE_EXCEEDED"
        first, second = fleet.ledger.jobs.attempts(job.id)
        # A deadline asks `retry`, not `on_crash`, and counts as no crash.
        assert (first.state, second.state) == (AttemptState.FAILED, AttemptState.FAILED)
        assert job.record().crash_count == 0
        for attempt in (first, second):
            autopsy = attempt.autopsy
            assert autopsy is not None
            assert autopsy.kind is DeathKind.DEADLINE
            assert "in _hang" in autopsy.stack
            assert "unstuck/runner" not in autopsy.stack
            assert autopsy.signals[0] == "stack noted"
            assert "SIGTERM" in autopsy.signals
            if how in ("gil", "ignore"):
                assert autopsy.signals[-1].startswith("SIGKILL")
    assert sibling.result(timeout=MOST_S) == "rested"
    assert worker.process.poll() is None


def test_a_job_that_is_asked_to_stop_may_clean_up(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "2")
    notes = {how: tmp_path / how.replace(" ", "-") for how in ("sleep", "event loop")}
    jobs = {how: fleet.task("hang").enqueue(how, str(file)) for how, file in notes.items()}
    for how, job in jobs.items():
        with pytest.raises(DeadlineExceeded):
            job.result(timeout=MOST_S)
        said = notes[how].read_text()
        assert said.count("cleaned up") == 2
        assert not any(step.startswith("SIGKILL") for step in last_autopsy(fleet, job.id).signals)
        # What was interrupted may be half done: no other job begins in its process.
        pids = [line.split()[1] for line in said.splitlines() if line.startswith("begun")]
        assert len(set(pids)) == 2
    assert fleet.task("add").enqueue(1, 2).result(timeout=MOST_S) == 3


def test_a_success_that_comes_after_the_deadline_and_before_the_kill_is_a_success(fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start("--concurrency", "1")
    job = fleet.task("end_late").enqueue(str(tmp_path / "notes"))
    assert job.result(timeout=MOST_S) == "done, though late"
    assert "broke a limit" in worker.said(), "it was past its deadline"
    [attempt] = fleet.ledger.jobs.attempts(job.id)
    assert (attempt.state, attempt.autopsy) == (AttemptState.SUCCEEDED, None)
    assert (tmp_path / "notes").read_text().count("begun") == 1, "it is not done twice"
    assert fleet.task("add").enqueue(1, 2).result(timeout=MOST_S) == 3


@pytest.mark.parametrize("how", ["c sleep", "c sleep with the gil"])
def test_a_c_call_that_our_signal_cuts_short_is_no_success(fleet: Fleet, how: str) -> None:
    fleet.start("--concurrency", "1")
    job = fleet.task("hang").enqueue(how)
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    for attempt in fleet.ledger.jobs.attempts(job.id):
        assert attempt.autopsy is not None
        assert attempt.autopsy.signals == ("stack noted", "SIGTERM"), "it is obeyed at once"
        assert "in _hang" in attempt.autopsy.stack


def test_a_process_that_was_stopped_is_woken_to_say_where_it_stood(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    job = fleet.task("hang").enqueue("stopped")
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    autopsy = last_autopsy(fleet, job.id)
    assert autopsy.signals[:2] == ("SIGCONT, since its process was stopped", "stack noted")
    assert "in _hang" in autopsy.stack


def test_code_that_reset_every_signal_is_ended_all_the_same(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="0.5s")
    fleet.start("--concurrency", "1")
    job = fleet.task("hang").enqueue("reset")
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    autopsy = last_autopsy(fleet, job.id)
    assert autopsy.kind is DeathKind.DEADLINE
    assert autopsy.signals[0] == "stack noted", "no signal is needed for that"
    assert "in _hang" in autopsy.stack


def test_an_async_job_past_its_deadline_is_cancelled_and_its_siblings_go_on(fleet: Fleet, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    fleet.start("--concurrency", "10")
    siblings = [fleet.begin("nap_async", 3.0)[0] for _ in range(3)]
    job = fleet.task("hang_async").enqueue("sleep", str(notes))
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    assert "cleaned up" in notes.read_text()
    autopsy = last_autopsy(fleet, job.id)
    assert (autopsy.kind, autopsy.beside_count) == (DeathKind.DEADLINE, 0)
    assert "in hang_async" in autopsy.stack
    for sibling in siblings:
        assert sibling.result(timeout=MOST_S) == "rested"
        assert len(fleet.ledger.jobs.attempts(sibling.id)) == 1


def test_an_async_job_that_will_not_stop_takes_its_loop_along_and_nobody_else_is_blamed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="0.5s")
    fleet.start("--concurrency", "10")
    for how in ("stubborn", "loop"):
        sibling, _ = fleet.begin("nap_async_once_then_quick", 600)
        job = fleet.task("hang_async").enqueue(how)
        with pytest.raises(DeadlineExceeded):
            job.result(timeout=MOST_S)
        if how == "loop":
            assert "in _hang" in last_autopsy(fleet, job.id).stack
        assert sibling.result(timeout=MOST_S) == "quick"
        record = sibling.record()
        assert (record.crash_count, record.suspected_crashes) == (0, 0)
        first = fleet.ledger.jobs.attempts(sibling.id)[0].autopsy
        assert first is not None
        assert first.kind is DeathKind.SHARED
        assert f"job {job.id}" in first.summary


@pytest.mark.parametrize("where", ["itself", "a task of its own"])
def test_the_one_that_blocks_the_loop_is_blamed_and_not_the_one_that_ran_out_of_time(
    make_fleet: MakeFleet, tmp_path: Path, where: str
) -> None:
    fleet = make_fleet(stop_grace="2s", runner_heartbeat_interval="0.2s")
    fleet.start("--concurrency", "10")
    sibling, _ = fleet.begin("nap_async_once_then_quick", 600)
    notes = str(tmp_path / "late")
    blocker = fleet.task("block_the_loop").enqueue(600, str(tmp_path / "blocker"), where, notes)
    late = fleet.task("hang_async").enqueue("sleep", notes)
    with pytest.raises(DeadlineExceeded) as overran:
        late.result(timeout=MOST_S)
    assert f"job {blocker.id} kept the event loop" in str(overran.value.cause)
    with pytest.raises(JobQuarantined):
        blocker.result(timeout=MOST_S)
    autopsy = last_autopsy(fleet, blocker.id)
    assert autopsy.kind is DeathKind.BLOCKED_LOOP
    assert f"so that job {late.id} could not be stopped" in autopsy.summary
    assert "in block" in autopsy.stack
    assert sibling.result(timeout=MOST_S) == "quick"
    record = sibling.record()
    assert (record.crash_count, record.suspected_crashes) == (0, 0)


def test_who_holds_the_interpreter_of_a_shared_loop_is_not_known_and_all_are_suspects(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="3s", runner_heartbeat_interval="0.2s")
    fleet.start("--concurrency", "10")
    sibling, _ = fleet.begin("nap_async_once_then_quick", 600)
    job = fleet.task("hang_async").enqueue("gil")
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    assert sibling.result(timeout=MOST_S) == "quick"
    record = sibling.record()
    assert (record.crash_count, record.suspected_crashes) == (0, 1)
    first = fleet.ledger.jobs.attempts(sibling.id)[0].autopsy
    assert first is not None
    assert "in whichever job" in first.summary


def test_an_async_job_that_will_not_stop_shows_where_it_waited(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="0.5s")
    fleet.start("--concurrency", "10")
    job = fleet.task("hang_async").enqueue("stubborn")
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=MOST_S)
    stack = last_autopsy(fleet, job.id).stack
    assert stack.startswith(f"Task of job {job.id} ")
    assert "in hang_async" in stack


def test_the_stack_of_a_death_on_a_shared_loop_is_not_that_of_a_job_stopped_before(fleet: Fleet) -> None:
    fleet.start("--concurrency", "10")
    with pytest.raises(DeadlineExceeded):
        fleet.task("hang_async").enqueue("sleep").result(timeout=MOST_S)
    job = fleet.task("hang_async").enqueue("segfault")
    with pytest.raises(WorkerCrashed):
        job.result(timeout=MOST_S)
    stack = last_autopsy(fleet, job.id).stack
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert "in hang_async" in stack


def test_a_job_that_closes_every_descriptor_and_goes_on_is_ended_and_told_so(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "1")
    job = fleet.task("die").enqueue("let go")
    wait_for(worker.runners, "a runner")
    (runner,) = worker.runners()
    with pytest.raises(WorkerCrashed) as caught:
        job.result(timeout=MOST_S)
    assert "closed descriptors" in str(caught.value.cause)
    wait_for(lambda: not runner.is_running(), "the runner to be gone")


@pytest.mark.parametrize("task", ["hang", "hang_async"])
def test_a_worker_that_waits_for_a_job_to_stop_does_not_spin(make_fleet: MakeFleet, task: str) -> None:
    fleet = make_fleet(stop_grace="600s")
    worker = fleet.start("--concurrency", "2")
    fleet.task(task).enqueue("ignore" if task == "hang" else "stubborn")
    wait_for(lambda: "broke a limit" in worker.said(), "the job to be stopped")

    def cpu_s() -> float:
        times = OwnProcess(worker.pid).cpu_times()
        return times.user + times.system

    before_s, began_s = cpu_s(), time.monotonic()
    time.sleep(2.0)  # The time over which it is measured.
    assert (cpu_s() - before_s) / (time.monotonic() - began_s) < 0.5, "one that spins takes all of a core"


def test_the_deadline_of_a_job_does_not_run_while_its_process_imports_the_app(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fleet.TASKS", "tests.crash.apps.slow_to_import:app")
    worker = fleet.start("--concurrency", "2")
    jobs = [fleet.task(task).enqueue("not at all") for task in ("hang", "hang_async")]
    for job in jobs:
        job.result(timeout=MOST_S)
    assert "Runners are spawned" in worker.said()
    assert "broke a limit" not in worker.said()


@pytest.mark.parametrize("task", ["hang", "hang_async"])
def test_a_process_that_dies_while_it_imports_the_app_takes_no_job_along(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str
) -> None:
    monkeypatch.setattr("tests.support.fleet.TASKS", "tests.crash.apps.slow_to_import:app")
    may_import = tmp_path / "may-import"
    may_import.touch()
    worker = fleet.start("--concurrency", "2", IMPORT_GATE=str(may_import))
    may_import.unlink()
    job = fleet.task(task).enqueue("not at all")
    wait_for(worker.runners, "a runner that imports")
    worker.runners()[0].kill()
    may_import.touch()
    job.result(timeout=MOST_S)
    assert job.record().crash_count == 0
    assert "before it began anything" in worker.said()


def test_a_job_that_gives_no_more_signs_is_stalled(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "2")
    over = tmp_path / "over"
    good = fleet.task("give_signs_until").enqueue(str(over))
    fleet.wait_running(good)
    mute = fleet.task("work_with_signs").enqueue(5, str(tmp_path / "notes"), "progress")
    with pytest.raises(Stalled) as caught:
        mute.result(timeout=MOST_S)
    assert caught.value.code == "STALLED"
    assert "stall_timeout of 2s" in str(caught.value.cause)
    autopsy = last_autopsy(fleet, mute.id)
    assert autopsy.kind is DeathKind.STALL
    assert "in work_with_signs" in autopsy.stack
    assert autopsy.progress is not None
    assert (autopsy.progress.done, autopsy.progress.total, autopsy.progress.message) == (5, 5, "step 5")
    # It has worked for longer than the stall_timeout: signs, and not time, decide.
    over.touch()
    assert good.result(timeout=MOST_S) == "done"


def test_an_async_job_is_stalled_by_its_own_silence_alone(fleet: Fleet) -> None:
    fleet.start("--concurrency", "10")
    sibling, _ = fleet.begin("nap_async", 3.0)
    job = fleet.task("async_with_signs").enqueue(15)
    with pytest.raises(Stalled):
        job.result(timeout=MOST_S)
    progress = last_autopsy(fleet, job.id).progress
    assert progress is not None
    assert progress.done == 14
    assert sibling.result(timeout=MOST_S) == "rested"


def test_progress_is_seen_while_the_job_runs(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "1")
    job = fleet.task("work_with_signs").enqueue(60, how="progress")

    def seen() -> bool:
        found = fleet.ledger.jobs.progress([job.id]).get(job.id)
        return found is not None and (found.done or 0) >= 2 and found.total == 60 and found.message.startswith("step")

    wait_for(seen, "progress in the ledger")
    assert fleet.state(job) is JobState.RUNNING
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(timeout=MOST_S)


def hold_the_gil(fleet: Fleet, pipe: Path) -> Job:
    """Let a job hold the GIL until the test opens the pipe; return when its worker has told that it does."""
    os.mkfifo(pipe)
    job = fleet.task("hold_the_gil_until_opened").enqueue(str(pipe))

    def busy() -> bool:
        found = fleet.ledger.jobs.progress([job.id]).get(job.id)
        return found is not None and found.busy_since is not None and found.busy_since < time.time()

    wait_for(busy, "the silence in the ledger")
    return job


def test_a_silent_interpreter_is_shown_and_no_verdict(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "1")
    job = hold_the_gil(fleet, tmp_path / "pipe")
    assert fleet.state(job) is JobState.RUNNING
    with (tmp_path / "pipe").open("r+b", buffering=0):
        assert job.result(timeout=MOST_S) == "held"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


def test_a_silent_interpreter_is_a_verdict_where_the_task_says_so(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="0.5s", runner_heartbeat_interval="0.5s")
    fleet.start("--concurrency", "1")
    job = fleet.task("hold_the_gil_too_long").enqueue()
    with pytest.raises(Stalled) as caught:
        job.result(timeout=MOST_S)
    assert "no Python code ran" in str(caught.value.cause)
    autopsy = last_autopsy(fleet, job.id)
    assert autopsy.kind is DeathKind.INTERPRETER
    assert "in stuck_in_c" in autopsy.stack


def test_a_job_over_its_memory_limit_is_ended_alone(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 3.0)
    assert fleet.task("eat_over_limit").enqueue(5).result(timeout=MOST_S) == 5
    job = fleet.task("eat_over_limit").enqueue(5000)
    # No crash retry is allowed to it: the first death over the limit quarantines.
    with pytest.raises(JobQuarantined) as caught:
        job.result(timeout=MOST_S)
    assert "over its memory_limit of 150 MB" in str(caught.value.cause)
    autopsy = last_autopsy(fleet, job.id)
    assert autopsy.kind is DeathKind.MEMORY_LIMIT
    assert autopsy.memory_bytes is not None
    assert 150_000_000 < autopsy.memory_bytes < 2_000_000_000
    assert "in eat_over_limit" in autopsy.stack
    assert fleet.ledger.jobs.attempts(job.id)[-1].state is AttemptState.CRASHED
    assert sibling.result(timeout=MOST_S) == "rested"
    assert worker.process.poll() is None
    assert not issubclass(JobQuarantined, OutOfMemory)


def test_a_job_is_not_held_to_its_memory_limit_for_what_another_one_left_behind(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    fleet.task("leave_memory").enqueue(300).result(timeout=MOST_S)
    assert fleet.task("eat_over_limit").enqueue(5).result(timeout=MOST_S) == 5


def test_a_cancelled_job_may_clean_up_too(fleet: Fleet, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    fleet.start("--concurrency", "1")
    job = fleet.task("hang").enqueue("sleep", str(notes))
    wait_for(lambda: notes.exists() and "begun" in notes.read_text(), "the job to begin")
    runner = int(notes.read_text().split()[1])
    assert job.cancel() == "requested"
    with pytest.raises(JobCancelled):
        job.result(timeout=MOST_S)
    assert "cleaned up" in notes.read_text()
    wait_for(lambda: not psutil.pid_exists(runner), "its runner to end")


def test_c_code_that_holds_the_gil_for_three_timeouts_costs_no_job(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**PROMPT)
    fleet.start("--concurrency", "2")
    fleet.start("--concurrency", "2")
    job = hold_the_gil(fleet, tmp_path / "pipe")
    fleet.backdoor().age_job(job.id, 3 * LEASE_S)
    wait_heartbeats(fleet, SEVERAL_SWEEPS)
    with (tmp_path / "pipe").open("r+b", buffering=0):
        assert job.result(timeout=60) == "held"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


@pytest.mark.long
def test_c_code_that_really_holds_the_gil_for_three_timeouts_costs_no_job(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="10s", check_interval="0.2s")
    fleet.start("--concurrency", "2")
    fleet.start("--concurrency", "2")
    job = fleet.task("hold_the_gil").enqueue(30.0)
    assert job.result(timeout=90) == "held"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


def test_a_healthy_job_of_ten_timeouts_runs_once(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**PROMPT)
    fleet.start("--concurrency", "2")
    fleet.start("--concurrency", "2")
    over = tmp_path / "over"
    tasks = ("wait_for_file", "wait_for_file_again")
    notes = [tmp_path / task for task in tasks]
    jobs = [fleet.task(task).enqueue(str(over), str(file)) for task, file in zip(tasks, notes, strict=True)]
    wait_for(lambda: all(file.exists() for file in notes), "both jobs to begin")
    for job in jobs:
        fleet.backdoor().age_job(job.id, 10 * LEASE_S)
    wait_heartbeats(fleet, SEVERAL_SWEEPS)
    over.touch()
    for job in jobs:
        assert job.result(timeout=60) == "rested"
        assert len(fleet.ledger.jobs.attempts(job.id)) == 1
    assert [file.read_text().count("begun") for file in notes] == [1, 1]
