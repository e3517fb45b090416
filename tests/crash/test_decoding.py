"""A payload that nobody should have written: its decoding fails, or takes the process along. Nobody else is harmed."""

from pathlib import Path

import pytest
from tests.crash.conftest import started_in
from tests.fleet import Fleet, at_best

from unstuck import OutOfMemory, TaskFailed, WorkerCrashed
from unstuck.client.job import Job
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState
from unstuck.store.records import NewJob

MOST_S = 60.0
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
    [enqueued] = fleet.ledger.enqueue([NewJob(task, "default", payload)])
    return fleet.app.job(enqueued.job_id)


def only_autopsy(fleet: Fleet, job: Job) -> Autopsy:
    [attempt] = fleet.ledger.attempts(job.id)
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
            job.result(timeout=MOST_S)
        assert (caught.value.code, caught.value.remote_type) == ("TASK_FAILED", "CannotCall")
        said = str(caught.value)
        assert f"The arguments of job {job.id} cannot be read: " in said
        assert UNREADABLE[name][1] in said
        [attempt] = fleet.ledger.attempts(job.id)
        assert (attempt.state, attempt.autopsy) == (AttemptState.FAILED, None), "no process died of it"
    assert sibling.result(timeout=MOST_S) == "rested"
    # One process did it all, or two; and those that were there are still there.
    assert runner in {process.pid for process in worker.runners()}
    assert fleet.task(task).enqueue(1, 2).result(timeout=MOST_S) == 3
    assert worker.process.poll() is None


def test_arguments_that_need_too_much_memory_fail_their_job_alone(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2", LIVE_WITH="little memory")
    sibling, _ = fleet.begin("nap", 2.0)
    with pytest.raises(TaskFailed, match="they need more memory than this process may have") as caught:
        put(fleet, SMALL_THAT_GROWS).result(timeout=MOST_S)
    assert caught.value.remote_type == "CannotCall"
    assert sibling.result(timeout=MOST_S) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=MOST_S) == 3
    assert worker.process.poll() is None


def test_a_payload_that_overflows_the_stack_in_its_decoding_is_a_death_like_any_other(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2", LIVE_WITH="no limit of recursion")
    sibling, _ = fleet.begin("nap", 4.0)

    def die_once() -> float:
        job = put(fleet, UNREADABLE["lists without end"][0])
        with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
            job.result(timeout=MOST_S)
        assert caught.value.code == "WORKER_CRASHED"
        assert str(caught.value.cause) == "killed by SIGSEGV (signal 11)"
        autopsy = only_autopsy(fleet, job)
        assert (autopsy.kind, autopsy.signal) == (DeathKind.SIGNAL, "SIGSEGV")
        assert (autopsy.detector, autopsy.sure) == (Detector.RUNNER, True)
        assert autopsy.stack.startswith("Fatal Python error: Segmentation fault")
        assert "in decode_call" in autopsy.stack, "it says where: in the decoding, before any code of the task"
        assert "in add" not in autopsy.stack
        assert autopsy.seen_after_s is not None
        return autopsy.seen_after_s

    at_best(die_once, 0.5)
    assert sibling.result(timeout=MOST_S) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=MOST_S) == 3
    assert worker.process.poll() is None


def test_a_payload_that_eats_all_memory_in_its_decoding_is_a_death_of_memory(memory_cgroup: Path, fleet: Fleet) -> None:
    worker = started_in(memory_cgroup, fleet)
    try:
        sibling, _ = fleet.begin("nap", 2)
        job = put(fleet, SMALL_THAT_GROWS)
        with pytest.raises(OutOfMemory) as caught:
            job.result(timeout=MOST_S)
        assert caught.value.code == "OUT_OF_MEMORY"
        assert str(caught.value.cause).startswith("killed by SIGKILL (signal 9): out of memory: the kernel killed")
        assert only_autopsy(fleet, job).kind is DeathKind.OUT_OF_MEMORY
        assert sibling.result(timeout=MOST_S) == "rested"
        assert fleet.task("add").enqueue(1, 2).result(timeout=MOST_S) == 3
        assert worker.process.poll() is None
    finally:
        worker.kill_family()
