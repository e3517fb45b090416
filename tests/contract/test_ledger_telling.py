"""Events that belong to no other verb, a glance at jobs, and pairs of queue and task that nobody would take."""

from tests.contract.hands import birth, claim, put, start

from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import TaskRecord


def test_an_event_is_written_and_read(ledger: Ledger) -> None:
    number = ledger.note_event("no_workers", "nobody is there", job_id=7, worker_id="w9")
    [event] = [event for event in ledger.events(limit=10) if event.kind == "no_workers"]
    assert (event.id, event.job_id, event.worker_id, event.message) == (number, 7, "w9", "nobody is there")


def test_a_glance_says_where_jobs_stand(ledger: Ledger) -> None:
    ledger.register(birth("w1"))
    first, second = put(ledger), put(ledger)
    [job] = claim(ledger, limit=1)
    start(ledger, [job])
    seen = {glance.job_id: glance for glance in ledger.glance([first, second, 999])}
    assert set(seen) == {first, second}
    assert (seen[first].state, seen[first].token, seen[first].worker_id) == (JobState.RUNNING, job.token, "w1")
    assert seen[second].state is JobState.PENDING
    assert seen[second].worker_id is None
    assert ledger.glance([]) == []


def test_unserved_are_pairs_that_no_worker_would_take(ledger: Ledger) -> None:
    wanted = [("default", "add"), ("default", "unknown"), ("other", "add")]
    assert ledger.unserved(wanted) == set(wanted)
    tasks = (TaskRecord("add", "default"),)
    ledger.register(birth("w1", tasks=tasks, suspect_after_s=60.0))
    assert ledger.unserved(wanted) == {("default", "unknown"), ("other", "add")}
    ledger.request("w1", "drain", "test")
    assert ledger.unserved(wanted) == set(wanted)
    ledger.register(birth("w2", tasks=tasks, suspect_after_s=60.0))
    assert ("default", "add") not in ledger.unserved(wanted)
    ledger.disable("w2", "a test", "test")
    assert ("default", "add") in ledger.unserved(wanted)


def test_a_silent_worker_serves_nothing(ledger: Ledger) -> None:
    ledger.register(birth("w1", suspect_after_s=0.0))
    assert ledger.unserved([("default", "add")]) == {("default", "add")}
