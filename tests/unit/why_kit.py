"""Evidence for stories of jobs: the records of one job, to be changed in one place per test."""

from typing import Any

import msgspec
from tests.tale import NOON, attempt, records

from unstuck.client.explaining import Surroundings
from unstuck.client.why.gathering import Evidence
from unstuck.client.why.story import Step, StepKind, Story
from unstuck.config import Recovery
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.errors import ErrorCode
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState

DIED = Autopsy(DeathKind.SIGNAL, "killed by SIGSEGV (signal 11)", Detector.RUNNER)


def of(job: dict[str, Any], attempts: list[Any] = [], **more: Any) -> Evidence:  # noqa: B006 - never changed
    """The tale's job with changes: fresh, never tried, unless told otherwise."""
    fresh = {
        "state": JobState.PENDING,
        "error": None,
        "failures": 0,
        "crash_count": 0,
        "run_at": NOON - 2.0,
        "claimed_at": None,
        "started_at": None,
        "finished_at": None,
        "worker_id": None,
        "token": None,
        "unique_key": None,
        "priority": 0,
    }
    tale = records()
    around = Surroundings(
        more.pop("queue", None),
        more.pop("workers", tale.around.workers),
        Recovery().rules,
        more.pop("now_s", NOON + 900.0),
    )
    facts = {"events": [], "outputs": [], "progress": None, **more}
    return Evidence(msgspec.structs.replace(tale.job, **{**fresh, **job}), attempts, around=around, **facts)


def ended(state: JobState, token: int = 1, at_s: float = 10.0, **more: Any) -> dict[str, Any]:
    """A job that ended with the try of this token."""
    return {
        "state": state,
        "token": token,
        "worker_id": "w3",
        "started_at": NOON,
        "finished_at": NOON + at_s,
        **more,
    }


def texts(story: Story, kind: StepKind | None = None) -> list[str]:
    return [step.text for step in story.steps if kind is None or step.kind is kind]


def step_of(story: Story, kind: StepKind) -> Step:
    return next(step for step in story.steps if step.kind is kind)


def failed(token: int, began_s: float, code: str = ErrorCode.TASK_FAILED) -> Any:
    return attempt(token, "w3", AttemptState.FAILED, began_s, began_s + 1.0, code, cause="boom")
