"""A runner dies in the middle of a job."""

import signal
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet, started_in
from tests.support.fleet import TIMEOUT_S, Fleet
from tests.support.signals import send_signal

from unstuck import JobQuarantined, OutOfMemory, TaskFailed, WorkerCrashed
from unstuck.client.job import Job
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract.jobs import NewJob


def test_a_killed_runner_is_seen_by_its_worker_and_its_siblings_are_untouched(fleet: Fleet) -> None:
    fleet.start("--concurrency", "3")
    sibling, _ = fleet.begin("nap", 1.5)
    victim, runner = fleet.begin("nap", 60)
    fleet.task("add").enqueue_many([(n, n) for n in range(50)])
    send_signal(runner, signal.SIGKILL)
    with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
        victim.result(timeout=TIMEOUT_S)
    assert caught.value.code == "WORKER_CRASHED"
    assert "SIGKILL" in str(caught.value.cause)
    assert not isinstance(caught.value, OutOfMemory)
    assert only_attempt_autopsy(fleet, victim).detector is Detector.RUNNER
    assert sibling.result(timeout=30) == "rested"


@pytest.mark.parametrize(
    ("how", "words"), [("kill", "SIGKILL"), ("exit", "code 3"), ("segfault", "SIGSEGV")], ids=["kill", "exit", "segv"]
)
def test_every_way_of_dying_is_named(fleet: Fleet, how: str, words: str) -> None:
    worker = fleet.start("--concurrency", "1")
    job = fleet.task("die").enqueue(how)
    with pytest.raises(WorkerCrashed) as caught:
        job.result(timeout=30)
    assert words in str(caught.value.cause)
    # The worker lives: its log says what died. On the job the words are those that people look for.
    assert "Worker died" in str(caught.value)
    said = worker.said()
    assert "Worker died" not in said
    [line] = [line for line in said.splitlines() if "Runner process died; its job failed" in line]
    assert f"job_id={job.id}" in line
    assert words in line
    # So is every failure a line: each try, and the last one.
    failing = fleet.task("fail").enqueue("no such customer")
    with pytest.raises(TaskFailed):
        failing.result(timeout=30)
    lines = [line for line in worker.said().splitlines() if f"job_id={failing.id} " in line]
    assert len(lines) == len(fleet.ledger.jobs.attempts(failing.id))
    assert all("RuntimeError: no such customer" in line for line in lines)
    assert " Job failed [" in lines[-1]


def test_a_job_that_kills_four_times_is_quarantined(fleet: Fleet) -> None:
    fleet.start("--concurrency", "2")
    job = fleet.task("die_again").enqueue("kill")
    fleet.wait_final(job)
    record = job.record()
    assert record.state is JobState.QUARANTINED
    assert record.crash_count == 4
    assert record.error is not None
    assert record.error.code == "CRASHED_TOO_OFTEN"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 4
    # It kills its runners, not the worker: others are served as before.
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_the_whole_fork_server_dies_and_work_goes_on(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    job, _ = fleet.begin("nap_again", 2)
    fork_server = worker.family()[1]
    fork_server.send_signal(signal.SIGKILL)
    assert job.result(timeout=60) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


def test_an_async_runner_dies_with_all_that_it_was_doing(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "10")
    jobs = [fleet.begin("nap_async", 30)[0] for _ in range(3)]
    again = [fleet.begin("nap_async_again", 0.5)[0] for _ in range(3)]
    worker.runners()[0].kill()
    for job in jobs:
        with pytest.raises(WorkerCrashed):
            job.result(timeout=10)
    for job in again:
        assert job.result(timeout=30) == "rested"


POISON_TIMEOUT_S = 60.0


def test_a_job_that_always_kills_its_runner_is_quarantined_while_others_finish(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    poison = fleet.task("die_again").enqueue("segfault")
    others = fleet.task("add").enqueue_many([(n, n) for n in range(100)])
    assert [job.result(timeout=POISON_TIMEOUT_S) for job in others] == [2 * n for n in range(100)]
    with pytest.raises(JobQuarantined) as caught:
        poison.result(timeout=POISON_TIMEOUT_S)
    assert caught.value.code == "CRASHED_TOO_OFTEN"
    attempts = fleet.ledger.jobs.attempts(poison.id)
    # What it killed, each with its own autopsy.
    assert [attempt.state for attempt in attempts] == [AttemptState.CRASHED] * 4
    assert all(attempt.autopsy is not None and attempt.autopsy.signal == "SIGSEGV" for attempt in attempts)
    assert all(job.record().crash_count == 0 for job in others)
    assert worker.process.poll() is None


def test_a_poison_job_among_fifty_on_one_loop_is_found_by_running_alone(fleet: Fleet, tmp_path: Path) -> None:
    notes = [str(tmp_path / f"other-{number}") for number in range(50)]
    worker = fleet.start("--concurrency", "60")
    others = fleet.task("nap_async_once_then_quick").enqueue_many([(600, path) for path in notes])
    poison = fleet.task("poison_async").enqueue(notes)
    for job in others:
        assert job.result(timeout=POISON_TIMEOUT_S) == "quick"
        record = job.record()
        # In company it proves nothing, so nobody is charged with it.
        assert record.crash_count == 0
        assert record.suspected_crashes <= 1
    with pytest.raises(JobQuarantined):
        poison.result(timeout=POISON_TIMEOUT_S)
    record = poison.record()
    assert record.state is JobState.QUARANTINED
    assert record.crash_count == 3
    first, *alone = [attempt.autopsy for attempt in fleet.ledger.jobs.attempts(poison.id)]
    assert first is not None
    assert first.beside_count == 50
    assert "runs alone next" in first.rule
    assert [autopsy.beside_count for autopsy in alone if autopsy is not None] == [0, 0, 0]
    assert worker.process.poll() is None
    # Everything goes on as before, on one loop.
    assert fleet.task("add_async").enqueue(1, 2).result(timeout=POISON_TIMEOUT_S) == 3


AUTOPSY_TIMEOUT_S = 30.0


def only_autopsy(fleet: Fleet, job_id: int) -> Autopsy:
    [attempt] = fleet.ledger.jobs.attempts(job_id)
    assert attempt.autopsy is not None
    return attempt.autopsy


WAYS = {
    "kill": (DeathKind.SIGNAL, "SIGKILL", ""),
    "exit": (DeathKind.EXIT, "code 3", ""),
    "segfault": (DeathKind.SIGNAL, "SIGSEGV", "Fatal Python error: Segmentation fault"),
    "abort": (DeathKind.SIGNAL, "SIGABRT", "Fatal Python error: Aborted"),
}


def test_every_way_of_dying_is_explained(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "5")
    sibling, _ = fleet.begin("nap", 1.0)
    jobs = {how: fleet.task("die").enqueue(how) for how in WAYS}
    for how, (kind, words, stack) in WAYS.items():
        job = jobs[how]
        with pytest.raises(WorkerCrashed) as caught:
            job.result(timeout=AUTOPSY_TIMEOUT_S)
        assert caught.value.code == "WORKER_CRASHED"
        assert words in str(caught.value.cause)
        autopsy = only_autopsy(fleet, job.id)
        assert (autopsy.kind, autopsy.detector, autopsy.sure) == (kind, Detector.RUNNER, True)
        assert words in autopsy.summary
        assert autopsy.stack.startswith(stack)
        assert ("in end_by" in autopsy.stack) == bool(stack)
        assert autopsy.pid is not None
        assert (autopsy.max_memory_bytes or 0) > 1_000_000
        assert autopsy.cpu_s is not None
        assert autopsy.seen_after_s is not None
        assert autopsy.seen_after_s < AUTOPSY_TIMEOUT_S
        assert autopsy.rule.startswith('on_crash="fail"')
        assert autopsy.stdout == f"died of {how}"
    assert sibling.result(timeout=AUTOPSY_TIMEOUT_S) == "rested"
    assert worker.process.poll() is None


def test_a_worker_that_is_lost_leaves_an_autopsy_to_its_jobs(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    fleet.start("--queues", "other")
    jobs = [fleet.begin("nap", 60)[0], fleet.begin("nap", 60)[0]]
    worker.kill_family()
    for job in jobs:
        fleet.wait_final(job)
        autopsy = only_autopsy(fleet, job.id)
        assert autopsy.kind is DeathKind.WORKER_GONE
        assert autopsy.detector is Detector.PEER
        assert autopsy.beside == tuple(other.id for other in jobs if other.id != job.id)


def test_a_drain_is_explained_as_one(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(shutdown_grace="0.3s")
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 60)
    assert worker.stop() == 0
    autopsy = only_autopsy(fleet, job.id)
    assert autopsy.kind is DeathKind.DRAIN
    assert job.record().state is JobState.FAILED


DECODING_TIMEOUT_S = 60.0
DEEP = 1_000_000
PARTS = 4_000_000

UNREADABLE = {
    "nothing": (b"", "truncated"),
    "cut off": (b'{"args":[1,', "truncated"),
    "no JSON": (b"\x80\x04K\x01.", "malformed"),
    "a NUL": (b"\0", "malformed"),
    "NaN": (b'{"args":[NaN,1]}', "malformed"),
    "no text": (b'{"args":["\xff\xfe",1]}', "can't decode byte 0xff"),
    "no call": (b"[1,2]", "Expected `object`, got `array`"),
    "no arguments": (b'{"args":"12"}', "Expected `array`, got `str`"),
    "a number without end": (b'{"args":[%b,1]}' % (b"9" * DEEP), "out of range"),
    "lists without end": (b'{"args":[%b%b,1]}' % (b"[" * DEEP, b"]" * DEEP), "recursion depth exceeded"),
    "objects without end": (b'{"args":[%b' % (b'{"a":' * DEEP), "recursion depth exceeded"),
    "depth that is skipped": (b'{"other":%b%b}' % (b"[" * DEEP, b"]" * DEEP), "recursion depth exceeded"),
}
SMALL_THAT_GROWS = b'{"args":[[%b[]],1]}' % (b"[]," * PARTS)
"""A dozen megabytes of JSON that are hundreds as Python objects."""


def put(fleet: Fleet, payload: bytes, task: str = "add") -> Job:
    """Write a job straight into the ledger, as a program that is not ours could."""
    [enqueued] = fleet.ledger.jobs.enqueue([NewJob(task, "default", payload)])
    return fleet.app.job(enqueued.job_id)


def only_attempt_autopsy(fleet: Fleet, job: Job) -> Autopsy:
    [attempt] = fleet.ledger.jobs.attempts(job.id)
    assert attempt.state is AttemptState.CRASHED
    assert attempt.autopsy is not None
    return attempt.autopsy


@pytest.mark.parametrize("task", ["add", "add_async"])
def test_arguments_that_cannot_be_read_fail_their_job_and_kill_nobody(fleet: Fleet, task: str) -> None:
    worker = fleet.start("--concurrency", "2")
    sibling, runner = fleet.begin("nap" if task == "add" else "nap_async", 3.0)
    jobs = {name: put(fleet, payload, task) for name, (payload, _) in UNREADABLE.items()}
    for name, job in jobs.items():
        with pytest.raises(TaskFailed) as caught:
            job.result(timeout=DECODING_TIMEOUT_S)
        assert (caught.value.code, caught.value.remote_type) == ("TASK_FAILED", "CannotCall")
        said = str(caught.value)
        assert f"The arguments of job {job.id} cannot be read: " in said
        assert UNREADABLE[name][1] in said
        [attempt] = fleet.ledger.jobs.attempts(job.id)
        assert (attempt.state, attempt.autopsy) == (AttemptState.FAILED, None), "no process died of it"
    assert sibling.result(timeout=DECODING_TIMEOUT_S) == "rested"
    # One process did it all, or two; and those that were there are still there.
    assert runner in {process.pid for process in worker.runners()}
    assert fleet.task(task).enqueue(1, 2).result(timeout=DECODING_TIMEOUT_S) == 3
    assert worker.process.poll() is None


def test_arguments_that_need_too_much_memory_fail_their_job_alone(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2", LIVE_WITH="little memory")
    sibling, _ = fleet.begin("nap", 2.0)
    with pytest.raises(TaskFailed, match="they need more memory than this process may have") as caught:
        put(fleet, SMALL_THAT_GROWS).result(timeout=DECODING_TIMEOUT_S)
    assert caught.value.remote_type == "CannotCall"
    assert sibling.result(timeout=DECODING_TIMEOUT_S) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=DECODING_TIMEOUT_S) == 3
    assert worker.process.poll() is None


def test_a_payload_that_overflows_the_stack_in_its_decoding_is_a_death_like_any_other(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2", LIVE_WITH="no limit of recursion")
    sibling, _ = fleet.begin("nap", 4.0)

    job = put(fleet, UNREADABLE["lists without end"][0])
    with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
        job.result(timeout=DECODING_TIMEOUT_S)
    assert caught.value.code == "WORKER_CRASHED"
    assert str(caught.value.cause) == "killed by SIGSEGV (signal 11)"
    autopsy = only_attempt_autopsy(fleet, job)
    assert (autopsy.kind, autopsy.signal) == (DeathKind.SIGNAL, "SIGSEGV")
    assert (autopsy.detector, autopsy.sure) == (Detector.RUNNER, True)
    assert autopsy.stack.startswith("Fatal Python error: Segmentation fault")
    assert "in decode_call" in autopsy.stack, "it says where: in the decoding, before any code of the task"
    assert "in add" not in autopsy.stack
    assert autopsy.seen_after_s is not None
    assert sibling.result(timeout=DECODING_TIMEOUT_S) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=DECODING_TIMEOUT_S) == 3
    assert worker.process.poll() is None


def test_a_payload_that_eats_all_memory_in_its_decoding_is_a_death_of_memory(memory_cgroup: Path, fleet: Fleet) -> None:
    worker = started_in(memory_cgroup, fleet)
    try:
        sibling, _ = fleet.begin("nap", 2)
        job = put(fleet, SMALL_THAT_GROWS)
        with pytest.raises(OutOfMemory) as caught:
            job.result(timeout=DECODING_TIMEOUT_S)
        assert caught.value.code == "OUT_OF_MEMORY"
        assert str(caught.value.cause).startswith("killed by SIGKILL (signal 9): out of memory: the kernel killed")
        assert only_attempt_autopsy(fleet, job).kind is DeathKind.OUT_OF_MEMORY
        assert sibling.result(timeout=DECODING_TIMEOUT_S) == "rested"
        assert fleet.task("add").enqueue(1, 2).result(timeout=DECODING_TIMEOUT_S) == 3
        assert worker.process.poll() is None
    finally:
        worker.kill_family()
