"""The story of a job is told from its records alone: every death, rule and person, in plain words."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.job_stories import (
    AGAIN,
    DIED,
    HUNG,
    NOON,
    OUT_OF_MEMORY,
    POLICY,
    attempt,
    ended,
    failed,
    of,
    records,
    ruled,
    step_of,
    texts,
    worker,
)

from unstuck.cli.explain import show_story
from unstuck.cli.output import Output
from unstuck.client.why.autopsies import beside, cause_line, sentences
from unstuck.client.why.story import StepKind, story_view
from unstuck.client.why.tell import FIRST_TRIES, LAST_TRIES, tell
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.endings import Attempt, JobError, Raised, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.domain.units import in_words
from unstuck.domain.worker_health import Disabled
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.diagnosis import Blocker
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import DeferredRecord, OutputRecord, Progress
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.runner import stacks
from unstuck.worker.stack_file import tidy

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCS_COLUMNS = 100


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# The whole tale -------------------------------------------------------------------------------


def test_the_worked_example_of_the_docs_is_what_is_printed(
    utc: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(DOCS_COLUMNS))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    show = Output(as_json=False)
    show.pretty = True
    show_story(show, tell(records()))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    [example] = re.findall(r"^```text\n(.*?)\n```$", (DOCS / "why.md").read_text(), re.MULTILINE | re.DOTALL)
    assert example.splitlines() == printed


def test_every_step_of_the_tale_stands_in_order_of_time() -> None:
    story = tell(records())
    assert [step.kind.value for step in story.steps] == [
        "enqueued",
        *("started", "progress", "died", "decided"),
        *("started", "ended", "decided"),
        *("started", "died", "decided", "told"),
    ]
    assert [step.at for step in story.steps] == sorted(step.at for step in story.steps)


def test_json_keeps_what_the_docs_promise() -> None:
    view = msgspec.json.decode(msgspec.json.encode(story_view(tell(records()))))
    assert view.keys() == {"job", "told_at", "headline", "story", "next", "actions"}
    assert view["job"]["id"] == 42
    assert all(step.keys() == {"at", "kind", "text", "facts"} for step in view["story"])
    died = next(step for step in view["story"] if step["kind"] == "died")
    assert died["at"] == "2026-11-16T12:00:42.000Z"
    assert died["facts"]["autopsy"]["max_memory_bytes"] == 1_970_000_000
    assert died["facts"]["worker_name"] == "ada"
    assert view["actions"][0]["command"] == "unstuck retry 42"
    page = (DOCS / "why.md").read_text()
    for kind in (*StepKind, *DeathKind, *Autopsy.__struct_fields__):
        assert f"`{kind}`" in page, f"docs/why.md does not tell of {kind}"


# Birth ----------------------------------------------------------------------------------------


def test_a_happy_job_gets_a_short_happy_story() -> None:
    done = of(ended(JobState.SUCCEEDED, at_s=1.2), [attempt(1, "w3", AttemptState.SUCCEEDED, 0.0, 1.2)])
    story = tell(done)
    assert story.headline == "It succeeded on its first try, after 1.2 seconds."
    assert texts(story) == [
        "web.py@shop-1:311 enqueued it to queue 'reports'.",
        "Try 1: worker ada (w3) on crunch-1 claimed and started it after 2 seconds.",
        "Try 1 succeeded after 1.2 seconds.",
        "Whoever waits with `job.result()` gets what it returned.",
    ]
    assert story.next == "Nothing: it is done."
    assert [action.command for action in story.actions] == ["unstuck job 42"]


def test_a_success_after_deaths_counts_them() -> None:
    tries = [
        attempt(1, "w3", AttemptState.CRASHED, 0.0, 1.0, ErrorCode.WORKER_CRASHED, DIED),
        attempt(2, "w3", AttemptState.SUCCEEDED, 2.0, 3.0),
    ]
    story = tell(of(ended(JobState.SUCCEEDED, token=2, at_s=3.0, policy=encode_policy(POLICY)), tries))
    assert story.headline.endswith("on try 2, after 3 seconds; the one before it ended badly.")
    assert texts(story, StepKind.DECIDED) == ['Rule: on_crash="retry": it is tried again after its backoff.']


def test_a_scheduled_job_says_when_and_what_is_next() -> None:
    story = tell(of({"run_at": NOON + 3598.0}, now_s=NOON + 600.0))
    assert "It was scheduled to run 1 hour later." in texts(story)[0]
    assert story.headline == "It waits for its first try."
    assert "It is scheduled for" in story.next
    assert [action.command for action in story.actions] == ["unstuck doctor 42", "unstuck cancel 42"]


def test_waiting_begins_when_a_scheduled_job_is_due() -> None:
    due = of(
        ended(JobState.SUCCEEDED, run_at=NOON + 60.0, at_s=62.0), [attempt(1, "w3", AttemptState.SUCCEEDED, 61.0, 62.0)]
    )
    assert step_of(tell(due), StepKind.STARTED).facts["waited_s"] == 1.0


def test_a_job_that_nobody_signed_was_enqueued_by_somebody() -> None:
    story = tell(of({"enqueued_by": None, "priority": -3}))
    assert texts(story)[0] == "Somebody enqueued it to queue 'reports' with priority -3."


# Deaths ---------------------------------------------------------------------------------------


def test_a_worker_that_was_pruned_is_named_by_its_id() -> None:
    tries = [attempt(1, "w9", AttemptState.CRASHED, 0.0, 1.0, ErrorCode.WORKER_CRASHED, cause="gone")]
    story = tell(of(ended(JobState.FAILED), tries, workers=[]))
    assert "worker w9 (no longer in the ledger)" in step_of(story, StepKind.STARTED).text
    assert step_of(story, StepKind.DIED).text == "Try 1 died after 1 second: gone."


def test_a_death_without_an_autopsy_is_told_by_the_verdict_on_its_worker() -> None:
    verdict = WorkerVerdict(WorkerState.DEAD, Detector.LEASE, "no heartbeat for 60s", 60.0, "reaper")
    dead = worker("w3", "ada", "crunch-1", state=WorkerState.DEAD, verdict=verdict)
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 70.0, ErrorCode.WORKER_CRASHED, cause="silent")]
    died = step_of(tell(of(ended(JobState.FAILED), tries, workers=[dead])), StepKind.DIED)
    assert died.text.endswith(
        "Its worker's end was seen by the silence of its worker's heartbeat: no heartbeat for 60s."
    )


@pytest.mark.parametrize(
    ("count", "named", "words"),
    [
        (1, (7,), "job 7"),
        (2, (7, 8), "job 7 and job 8"),
        (52, tuple(range(7, 27)), "job 7, job 8, job 9 and 49 others"),
        (4, (7, 8, 9, 10), "job 7, job 8, job 9 and 1 other"),
        (3, (), "3 other jobs"),
    ],
)
def test_jobs_that_shared_the_process_are_named_and_counted(count: int, named: tuple[int, ...], words: str) -> None:
    shared = msgspec.structs.replace(DIED, beside=named, beside_count=count)
    assert beside(shared) == words
    assert f"It shared its process with {words}." in sentences(shared)


def test_a_worker_that_fell_silent_was_given_up_and_is_not_said_to_have_died() -> None:
    silent = Autopsy(DeathKind.LOST_HEARTBEAT, "worker w3 on host crunch-1: no heartbeat for 30s", Detector.LEASE)
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 10.0, ErrorCode.WORKER_CRASHED, silent)]
    [text] = texts(tell(of(ended(JobState.FAILED), tries)), StepKind.DIED)
    assert text.startswith("Try 1 was given up: worker w3 on host crunch-1: no heartbeat for 30s.")


def test_jobs_lost_with_their_worker_shared_the_worker_and_not_a_process() -> None:
    lost = msgspec.structs.replace(DIED, detector=Detector.PEER, beside=(7,), beside_count=1)
    assert "It shared its worker with job 7." in sentences(lost)


@pytest.mark.parametrize("detector", Detector)
def test_every_detector_has_its_words(detector: Detector) -> None:
    seen = sentences(msgspec.structs.replace(DIED, detector=detector, seen_after_s=0.006))[0]
    assert seen.startswith("Seen after 6 ms by ")


@pytest.mark.parametrize("kind", DeathKind)
def test_every_kind_of_death_is_a_sentence(kind: DeathKind) -> None:
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 1.0, "X", msgspec.structs.replace(DIED, kind=kind))]
    told = tell(of(ended(JobState.FAILED), tries)).steps[2]
    assert re.match(r"Try 1 (died|was ended|was given up): killed by SIGSEGV \(signal 11\)\. ", told.text)


def test_what_is_not_sure_is_called_probable_once_and_says_why() -> None:
    assert cause_line(AGAIN).startswith("probably killed by the kernel")
    assert "Not sure: the kernel's counter is shared with other processes of this container." in sentences(AGAIN)
    said_already = msgspec.structs.replace(AGAIN, summary="probably out of memory")
    assert cause_line(said_already).startswith("probably out of memory")


def test_one_line_tells_of_memory_and_stack() -> None:
    assert cause_line(HUNG) == "gave no sign for 30s, its stall_timeout, 1.1 GB of memory at most, left a stack"


@pytest.mark.parametrize("message", ["boom", ""])
def test_an_exception_is_named_once(message: str) -> None:
    error = conclude(Attempt(1, 1, Policy(), 0, 0), Raised("ValueError", message, "Traceback: boom")).error
    assert error is not None
    tries = [attempt(1, "w3", AttemptState.FAILED, 0.0, 1.0, ErrorCode.TASK_FAILED, cause=error.cause)]
    story = tell(of(ended(JobState.FAILED, error=error), tries))
    assert step_of(story, StepKind.FAILED).text.count("ValueError") == 1


def test_last_lines_come_from_the_output_where_no_autopsy_has_them() -> None:
    tries = [attempt(1, "w3", AttemptState.FAILED, 0.0, 1.0, ErrorCode.TASK_FAILED, cause="boom")]
    error = JobError(ErrorCode.TASK_FAILED, "boom", None, {"type": "ValueError", "traceback": "Traceback: boom"})
    output = OutputRecord(1, b"a\n" * 100 + b"last words \xff\n", b"")
    story = tell(of(ended(JobState.FAILED, error=error), tries, outputs=[output]))
    failed = step_of(story, StepKind.FAILED)
    assert failed.text == "Try 1 failed after 1 second: its code raised ValueError: boom."
    quotes = {quote.title: quote.text for quote in failed.quotes}
    assert quotes["traceback"] == "Traceback: boom"
    assert quotes["stdout"].endswith("last words �")
    assert len(quotes["stdout"].splitlines()) == 20
    assert failed.facts["stdout"] == quotes["stdout"]
    assert "unstuck logs 42" in [action.command for action in story.actions]


def test_a_novel_as_a_message_is_cut_in_the_text_and_whole_in_the_facts() -> None:
    tries = [attempt(1, "w3", AttemptState.FAILED, 0.0, 1.0, ErrorCode.TASK_FAILED, cause="x" * 10_000)]
    failed = step_of(tell(of(ended(JobState.FAILED), tries)), StepKind.FAILED)
    assert len(failed.text) < 700
    assert failed.facts["cause"] == "x" * 10_000


# Rules ----------------------------------------------------------------------------------------

TWICE = encode_policy(Policy(retry=RetryRule(max_attempts=2)))


def test_exceptions_follow_the_retry_rule_of_their_task() -> None:
    first = tell(of({"policy": TWICE, "run_at": NOON + 5.0}, [failed(1, 0.0)], now_s=NOON + 2.0))
    assert texts(first, StepKind.DECIDED) == ["Rule: retry: failure 1 of 2; tried again in 4 seconds."]
    assert first.headline == "It waits; try 1 ended badly: boom."
    last = tell(of(ended(JobState.FAILED, token=2, policy=TWICE), [failed(1, 0.0), failed(2, 5.0)]))
    assert texts(last, StepKind.DECIDED)[-1] == "Rule: retry: failure 2 of 2 was the last one."
    once = tell(of(ended(JobState.FAILED, policy=b""), [failed(1, 0.0)]))
    assert texts(once, StepKind.DECIDED) == ["Rule: the task has no retry: one failure ends it."]


def test_a_retry_by_hand_is_named_and_starts_the_counters_afresh() -> None:
    events = [EventRecord(9, NOON + 30.0, "retried", 42, "w3", "Queued again by ada@desk (it was failed)")]
    tries = [failed(1, 0.0), failed(2, 5.0), failed(3, 40.0)]
    story = tell(of({"policy": TWICE, "run_at": NOON + 42.0}, tries, events=events, now_s=NOON + 41.5))
    assert texts(story, StepKind.DECIDED) == [
        "Rule: retry: failure 1 of 2; tried again after its backoff.",
        "Rule: retry: failure 2 of 2 was the last one.",
        "Rule: retry: failure 1 of 2; tried again in 1 second.",
    ]
    [by_hand] = texts(story, StepKind.OPERATOR)
    assert by_hand == "Queued again by ada@desk (it was failed), with fresh counters; queue 'reports' was rung."
    # Whoever waited for the first end was told of it.
    assert texts(story, StepKind.NOTIFIED) == ["Whoever waits with `job.result()` gets TaskFailed."]
    assert step_of(story, StepKind.NOTIFIED).at < step_of(story, StepKind.OPERATOR).at


@pytest.mark.parametrize(
    ("state", "code", "rule"),
    [
        (AttemptState.CRASHED, ErrorCode.WORKER_CRASHED, "its effects may have happened, so it is not tried again"),
        (AttemptState.CRASHED, ErrorCode.CRASHED_TOO_OFTEN, "max_crash_retries=3: death 1 ends it"),
        (AttemptState.DRAINED, ErrorCode.WORKER_CRASHED, "a shutdown counts for nobody"),
        (AttemptState.CANCELLED, ErrorCode.CANCELLED, "somebody asked to cancel it"),
        (AttemptState.FAILED, ErrorCode.RESULT_NOT_STORABLE, "cannot be stored the next time"),
    ],
)
def test_rules_that_nobody_wrote_down_are_derived(state: AttemptState, code: str, rule: str) -> None:
    story = tell(of(ended(JobState.FAILED, policy=b""), [attempt(1, "w3", state, 0.0, 10.0, code, cause="so")]))
    decided = step_of(story, StepKind.DECIDED)
    assert rule in decided.text
    assert decided.facts["derived"] is True


def test_a_cancel_that_won_over_a_retry_is_the_rule() -> None:
    died = ruled(OUT_OF_MEMORY, 'on_crash="retry": crash 1 of 3 allowed; tried again in 100ms')
    tries = [attempt(1, "w3", AttemptState.CANCELLED, 0.0, 10.0, ErrorCode.CANCELLED, died)]
    events = [EventRecord(1, NOON + 5.0, "cancel_requested", 42, "w3", "ada@desk asked to cancel it")]
    story = tell(of(ended(JobState.CANCELLED), tries, events=events))
    assert texts(story, StepKind.DECIDED) == ["Rule: somebody asked to cancel it: it is not tried again."]
    assert texts(story, StepKind.OPERATOR) == ["ada@desk asked to cancel it; its worker was rung."]


def test_rules_that_this_version_cannot_read_are_admitted() -> None:
    story = tell(of(ended(JobState.FAILED, policy=b'{"retry": "for ever"'), [failed(1, 0.0)]))
    assert "Its stored rules cannot be read by this version" in step_of(story, StepKind.DECIDED).text


def test_a_job_cancelled_before_it_ran_tells_who_did_it_and_who_was_told() -> None:
    error = JobError(ErrorCode.CANCELLED, "Job was cancelled", "cancelled by ada@desk before it ran")
    events = [EventRecord(1, NOON + 5.0, "cancelled", 42, None, "Cancelled by ada@desk before it ran")]
    story = tell(of({"state": JobState.CANCELLED, "error": error, "finished_at": NOON + 5.0}, events=events))
    assert [step.kind.value for step in story.steps] == ["enqueued", "operator", "told"]
    assert story.steps[-1].facts["exception"] == "JobCancelled"
    assert story.headline == "It was cancelled: cancelled by ada@desk before it ran."
    assert story.actions[0].command == "unstuck retry 42"


def test_a_job_that_broke_its_limit_keeps_that_limit_when_it_is_retried_and_says_so() -> None:
    hung = msgspec.structs.replace(DIED, kind=DeathKind.DEADLINE, summary="ran longer than its timeout of 2s")
    code = ErrorCode.DEADLINE_EXCEEDED
    story = tell(of(ended(JobState.FAILED), [attempt(1, "w3", AttemptState.FAILED, 0.0, 10.0, code, hung)]))
    assert "its effects may have happened already" in story.actions[0].why
    assert "it keeps its timeout: to give it another, change the task and enqueue it anew" in story.actions[0].why


def test_a_job_that_went_with_its_queue_says_who_purged_it() -> None:
    error = JobError(ErrorCode.CANCELLED, "Job was cancelled", "queue 'reports' was purged by ada@desk")
    story = tell(of({"state": JobState.CANCELLED, "error": error, "finished_at": NOON + 5.0}))
    assert texts(story, StepKind.CANCELLED) == ["It ended without a try: queue 'reports' was purged by ada@desk."]


def test_a_job_cancelled_during_its_backoff_does_not_blame_its_last_try() -> None:
    error = JobError(ErrorCode.CANCELLED, "Job was cancelled", "cancelled by ada@desk before it ran")
    job = {"state": JobState.CANCELLED, "error": error, "finished_at": NOON + 5.0, "policy": TWICE}
    events = [EventRecord(1, NOON + 5.0, "cancelled", 42, None, "Cancelled by ada@desk before it ran")]
    story = tell(of(job, [failed(1, 0.0)], events=events))
    assert [step.kind.value for step in story.steps][-4:] == ["failed", "decided", "operator", "told"]
    assert story.steps[-1].facts["exception"] == "JobCancelled"
    assert step_of(story, StepKind.DECIDED).facts["final"] is False


def test_a_release_that_spent_no_try_is_told_as_an_event() -> None:
    events = [EventRecord(1, NOON + 5.0, "requeued", 42, "w3", "Task re-queued due to stale worker: w3")]
    assert texts(tell(of({}, events=events)), StepKind.EVENT) == ["Task re-queued due to stale worker: w3."]


@pytest.mark.parametrize("code", ErrorCode)
def test_whoever_waits_gets_the_exception_of_the_code(code: ErrorCode) -> None:
    tries = [attempt(1, "w3", AttemptState.FAILED, 0.0, 10.0, code, cause="so")]
    told = step_of(tell(of(ended(JobState.FAILED), tries)), StepKind.NOTIFIED)
    assert told.facts["exception"] in told.text
    assert told.facts["exception"] != "JobFailed"


def test_of_very_many_tries_the_middle_is_counted() -> None:
    tries = [failed(number, 2.0 * number) for number in range(1, 1001)]
    story = tell(of(ended(JobState.FAILED, token=1000, at_s=2001.0), tries))
    assert len(texts(story, StepKind.FAILED)) == FIRST_TRIES + LAST_TRIES
    [left_out] = texts(story, StepKind.OMITTED)
    assert left_out.startswith("975 tries are left out here")
    assert "Try 1000 failed" in texts(story, StepKind.FAILED)[-1]


# On the screen --------------------------------------------------------------------------------


def test_a_long_stack_is_cut_in_the_middle_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    stack = "\n".join(f"frame {number}" for number in range(100))
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 1.0, "X", msgspec.structs.replace(DIED, stack=stack))]
    story = tell(of(ended(JobState.FAILED), tries))
    show = Output(as_json=False)
    show_story(show, story)
    assert "frame 50" in capsys.readouterr().out
    show.pretty = True
    show_story(show, story)
    printed = capsys.readouterr().out
    assert "frame 50" not in printed
    assert "… 84 lines left out; --json has all …" in printed
    assert "frame 0" in printed
    assert "frame 99" in printed


@pytest.mark.parametrize(
    ("value_s", "words"),
    [
        (0.0, "0 ms"),
        (0.006, "6 ms"),
        (0.0004, "0.4 ms"),
        (0.35, "350 ms"),
        (0.9999, "1 second"),
        (1.0, "1 second"),
        (4.2, "4.2 seconds"),
        (42.0, "42 seconds"),
        (200.0, "3 minutes 20 seconds"),
        (3600.0, "1 hour"),
        (3605.0, "1 hour"),
        (90_000.0, "1 day 1 hour"),
        (-3.0, "0 ms"),
    ],
)
def test_durations_are_words_in_a_sentence(value_s: float, words: str) -> None:
    assert in_words(value_s) == words


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
    around = msgspec.structs.replace(running.context, deferred=deferred)
    story = tell(msgspec.structs.replace(running, context=around))
    assert story.headline == "Its code has ended, try 1; its outcome waits for a lock that another session holds."
    assert "cannot be written since 40s" in story.next
    assert "blocked by another session of the database" in story.next
    assert [action.command for action in story.actions] == ["unstuck doctor"], "there is nothing to cancel or to settle"
    young = Blocker("session", "4712", 5.0)
    old = Blocker("session", "4711", 50.0, "ada", "shop", "idle in transaction", "insert into orders", ("jobs",))
    named = msgspec.structs.replace(around, blockers=(young, old))
    story = tell(msgspec.structs.replace(running, context=named))
    assert (
        "most likely session 4711 (user ada, application 'shop', idle in transaction), in a transaction for 50s; "
        "its last statement: insert into orders." in story.next
    )
    assert "`select pg_terminate_backend(4711)`" in story.next
    sure = msgspec.structs.replace(around, blockers=(old, msgspec.structs.replace(young, jobs=(42,))))
    assert "it is session 4712" in tell(msgspec.structs.replace(running, context=sure)).next


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
    story = tell(msgspec.structs.replace(fresh, context=msgspec.structs.replace(fresh.context, workers=[off])))
    assert story.actions[0].command == "unstuck workers enable ada"


def test_a_paused_queue_says_how_to_go_on() -> None:
    queue = QueueRecord("reports", True, 1, 0, 0, 0, 1.0, 1)
    story = tell(of({}, queue=queue))
    assert "Queue 'reports' is paused" in story.next
    assert story.actions[0].command == "unstuck resume reports"


def test_a_suspect_is_said_to_run_alone() -> None:
    assert "It will run alone in its process" in tell(of({"run_alone": True})).next


def test_a_cancel_on_its_way_is_not_offered_again() -> None:
    story = tell(of({**RUNNING, "cancel_requested": True}, HELD))
    assert "Somebody asked to cancel it" in story.next
    assert story.actions == ()


def test_a_retry_after_a_crash_warns_of_effects() -> None:
    tries = [attempt(1, "w3", AttemptState.CRASHED, 0.0, 1.0, ErrorCode.WORKER_CRASHED, DIED)]
    [retry] = tell(of(ended(JobState.FAILED), tries)).actions
    assert "be sure that twice is safe" in retry.why


def stand_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait()


def told_by_another_thread() -> str:
    """Give what the pulse would write of us."""
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.append(stacks.of_threads()))
    asking.start()
    asking.join()
    return told[0]


def test_the_threads_of_a_process_are_told_with_the_main_one_first() -> None:
    begun, end = threading.Event(), threading.Event()
    other = threading.Thread(target=stand_here, args=(begun, end))
    other.start()
    begun.wait()
    try:
        blocks = told_by_another_thread().split("\n\n")
    finally:
        end.set()
        other.join()
    assert blocks[0].startswith(f"Current thread 0x{threading.main_thread().ident:016x} (most recent call first):\n")
    assert "in told_by_another_thread" in blocks[0]
    [found] = [block for block in blocks if "in stand_here" in block]
    assert found.startswith(f"Thread 0x{other.ident:016x} (most recent call first):\n")
    assert all("of_threads" not in block for block in blocks), "who asks is not told"


def test_a_deep_stack_is_bounded() -> None:
    def fall(depth: int) -> str:
        return fall(depth - 1) if depth else told_by_another_thread()

    block = fall(2 * stacks.MAX_FRAMES).split("\n\n")[0]
    assert block.count("  File ") == stacks.MAX_FRAMES
    assert block.rstrip().endswith("\n  ...")


def test_what_a_signal_writes_of_one_thread_comes_before_the_others() -> None:
    room = str(stacks.__file__).replace("stacks.py", "sync_loop.py")
    text = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in beside\n\n'
        f'Stack (most recent call first):\n  File "job.py", line 7 in job\n  File "{room}", line 3 in run\n'
    )
    assert tidy(text) == (
        'Stack (most recent call first):\n  File "job.py", line 7 in job\n\n'
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in beside'
    )


def test_frames_that_started_the_process_of_a_runner_are_not_the_jobs() -> None:
    room = str(stacks.__file__).removesuffix("stacks.py")
    text = (
        'Current thread 0x01 (most recent call first):\n  File "job.py", line 7 in job\n'
        f'  File "{room}sync_loop.py", line 3 in run\n  File "{room}child.py", line 9 in serve\n'
        f'  File "{room}fork_server.py", line 1 in _become\n  File "debugger.py", line 2 in start\n'
    )
    assert tidy(text) == 'Current thread 0x01 (most recent call first):\n  File "job.py", line 7 in job'


def test_a_job_that_waits_for_its_journal_is_shown_and_the_monitor_thread_is_not() -> None:
    room = str(stacks.__file__).removesuffix("stacks.py")
    text = (
        f'Thread 0x02 (most recent call first):\n  File "{room}monitor.py", line 8 in _beat\n\n'
        f'Current thread 0x01 (most recent call first):\n  File "{room}monitor.py", line 5 in ask\n'
        f'  File "job.py", line 7 in job\n  File "{room}sync_loop.py", line 3 in run\n'
    )
    assert tidy(text) == (
        f'Current thread 0x01 (most recent call first):\n  File "{room}monitor.py", line 5 in ask\n'
        '  File "job.py", line 7 in job'
    )
