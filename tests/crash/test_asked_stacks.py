"""A job that seems to hang is asked where it stands, and goes on as if nobody had."""

from tests.fleet import Fleet, wait_for

from unstuck.client.operator import Operator
from unstuck.domain.events import EventKind
from unstuck.domain.states import JobState


def stack_of(fleet: Fleet, job_id: int) -> str:
    told = [event.message for event in fleet.ledger.events(job_id=job_id) if event.kind == EventKind.STACK]
    return told[-1] if told else ""


def told_within(fleet: Fleet, job_id: int, patience_s: float) -> bool:
    try:
        return wait_for(lambda: "in nap" in stack_of(fleet, job_id), "its stack", patience_s)
    except AssertionError:
        return False


def test_the_stack_of_a_running_job_is_told_and_the_job_goes_on(fleet: Fleet) -> None:
    fleet.start()
    job, runner = fleet.begin("nap", 600)
    operator = Operator(fleet.ledger, fleet.app.settings)

    def asked_and_told() -> bool:
        # A ring may be lost: whoever hears nothing asks again.
        assert operator.ask_stack(job.id)
        return told_within(fleet, job.id, 2.0)

    wait_for(asked_and_told, "its stack")
    assert "Somebody asked where it stands." in [step.text for step in operator.why(job.id).steps]
    assert fleet.state(job) is JobState.RUNNING
    assert runner in {process.pid for process in fleet.workers[0].runners()}


def test_what_does_not_run_has_no_stack(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    assert not Operator(fleet.ledger, fleet.app.settings).ask_stack(job.id)
