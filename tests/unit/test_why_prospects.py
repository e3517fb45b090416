"""How a job stands, what happens next, and what an operator can do about it, told from its records alone."""

import msgspec
from tests.tale import NOON, attempt, worker
from tests.unit.why_kit import DIED, ended, of, texts

from unstuck.client.why.story import StepKind
from unstuck.client.why.telling import tell
from unstuck.domain.errors import ErrorCode
from unstuck.domain.health import Disabled
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.diagnosis import Blocker
from unstuck.store.records import DeferredRecord, Progress, QueueRecord

RUNNING = {"state": JobState.RUNNING, "token": 1, "worker_id": "w3", "started_at": NOON, "attempt": 1}
HELD = [attempt(1, "w3", AttemptState.RUNNING, 0.0, None)]


def test_a_running_job_says_where_since_when_and_how_far() -> None:
    progress = Progress(42, 1, NOON + 50.0, 5, 20, "fifth", NOON + 55.0)
    story = tell(of(RUNNING, HELD, progress=progress, now_s=NOON + 60.0))
    assert story.headline == "It is running, try 1."
    assert "on worker ada for 60s" in story.next
    assert 'It has come to 5 of 20 (25%), "fifth", 10 seconds ago.' in story.next
    assert "No Python code has run in its process for 5 seconds: it is busy in C code, or stuck there." in story.next
    assert [action.command for action in story.actions] == ["unstuck stack 42", "unstuck cancel 42"]


def test_a_job_whose_outcome_waits_for_a_lock_says_that_its_code_has_ended_and_who_is_in_the_way() -> None:
    running = of(RUNNING, HELD, now_s=NOON + 60.0)
    deferred = DeferredRecord("w3", False, "blocked by another session of the database", NOON + 20.0)
    around = msgspec.structs.replace(running.around, deferred=deferred)
    story = tell(msgspec.structs.replace(running, around=around))
    assert story.headline == "Its code has ended, try 1; its outcome waits for a lock that another session holds."
    assert "cannot be written since 40s" in story.next
    assert "blocked by another session of the database" in story.next
    assert [action.command for action in story.actions] == ["unstuck doctor"], "there is nothing to cancel or to settle"
    young = Blocker("session", "4712", 5.0)
    old = Blocker("session", "4711", 50.0, "ada", "shop", "idle in transaction", "insert into orders", ("jobs",))
    named = msgspec.structs.replace(around, blockers=(young, old))
    story = tell(msgspec.structs.replace(running, around=named))
    assert (
        "most likely session 4711 (user ada, application 'shop', idle in transaction), in a transaction for 50s; "
        "its last statement: insert into orders." in story.next
    )
    assert "`select pg_terminate_backend(4711)`" in story.next
    sure = msgspec.structs.replace(around, blockers=(old, msgspec.structs.replace(young, jobs=(42,))))
    assert "it is session 4712" in tell(msgspec.structs.replace(running, around=sure)).next


def test_progress_of_an_earlier_try_is_not_taken_for_this_one() -> None:
    story = tell(of(RUNNING, HELD, progress=Progress(42, 99, NOON, 5, 20)))
    assert texts(story, StepKind.PROGRESS) == []
    assert "come to" not in story.next


def test_a_job_of_a_silent_worker_says_how_to_settle_it() -> None:
    silent = worker("w3", "ada", "crunch-1", silent_s=300.0)
    story = tell(of(RUNNING, HELD, workers=[silent]))
    assert "has been silent for 5m" in story.next
    assert "unstuck stale --fail" in [action.command for action in story.actions]


def test_a_job_that_waits_for_disabled_workers_says_how_to_enable_one() -> None:
    off = worker("w3", "ada", "crunch-1", disabled=Disabled("new memory", "ada@desk", NOON))
    fresh = of({})
    story = tell(msgspec.structs.replace(fresh, around=msgspec.structs.replace(fresh.around, workers=[off])))
    assert story.actions[0].command == "unstuck workers enable ada"


def test_a_paused_queue_says_how_to_go_on() -> None:
    queue = QueueRecord("reports", True, 1, 0, 0, 0, 1.0, 1)
    story = tell(of({}, queue=queue))
    assert "Queue 'reports' is paused" in story.next
    assert story.actions[0].command == "unstuck resume reports"


def test_a_suspect_is_said_to_run_alone() -> None:
    assert "It will run alone in its process" in tell(of({"alone": True})).next


def test_a_cancel_on_its_way_is_not_offered_again() -> None:
    story = tell(of({**RUNNING, "cancel_requested": True}, HELD))
    assert "Somebody asked to cancel it" in story.next
    assert story.actions == ()


def test_a_retry_after_a_crash_warns_of_effects() -> None:
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 1.0, ErrorCode.WORKER_CRASHED, DIED)]
    [retry] = tell(of(ended(JobState.FAILED), tries)).actions
    assert "be sure that twice is safe" in retry.why
