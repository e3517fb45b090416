"""One job: its story, its attempts in time, its autopsies, output, progress and arguments."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.client import views
from unstuck.client.why.endings import brief_cause, sentences
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import JobNotFound
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import FINAL, HELD, JobState
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render
from unstuck.http.page.tiles import RunningJob
from unstuck.http.page.timeline import timeline
from unstuck.store.records import JobRecord, OutputRecord

MAX_OUTPUT_CHARS = 50_000

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    if not key.isdecimal() or len(key) > 19:
        raise JobNotFound(f"There is no job {key!r}.")
    operator = viewing.operator()
    story = operator.why(int(key))
    job = story.job
    seen = viewing.snapshot()
    ledger = viewing.desk.ledger
    attempts = ledger.attempts(job.id)
    progress = ledger.progress([job.id]).get(job.id) if job.state in HELD else None
    args, kwargs = views.call_view(job.payload, job.payload_type)
    return {
        "job": job,
        "story": story,
        "attempts": attempts,
        "timeline": timeline(job, attempts, seen.at),
        "autopsies": [(number, one, _autopsy(one.autopsy)) for number, one in enumerate(attempts, 1) if one.autopsy],
        "names": {worker.id: worker.name for worker in seen.workers},
        "progress": RunningJob(job, progress if progress is not None and progress.token == job.token else None),
        "args": viewing.redact(args),
        "kwargs": viewing.redact(kwargs),
        "result": viewing.redact(views.value_view(job.result, job.payload_type)),
        "has_result": job.state is JobState.SUCCEEDED,
        "outputs": [_output(output) for output in ledger.outputs(job.id)],
        "policy": _rules(job),
        "final": job.state in FINAL,
        "may_retry": job.state in (JobState.FAILED, JobState.CANCELLED),
        "may_release": job.state is JobState.QUARANTINED,
        "may_cancel": job.state not in FINAL,
    }


def _autopsy(autopsy: Autopsy | None) -> dict[str, Any]:
    assert autopsy is not None
    return {"cause": brief_cause(autopsy), "facts": sentences(autopsy), "rule": autopsy.rule, "body": autopsy}


def _output(output: OutputRecord) -> dict[str, str]:
    view = views.output_view(output)
    return {
        "token": view["token"],
        "stdout": _end_of(view["stdout"]),
        "stderr": _end_of(view["stderr"]),
    }


def _end_of(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    return f"… {len(text) - MAX_OUTPUT_CHARS:,} characters left out …\n{text[-MAX_OUTPUT_CHARS:]}"


def _rules(job: JobRecord) -> list[tuple[str, str]]:
    """Give the rules that are stored with the job, those that say something."""
    view = views.policy_view(decode_policy(job.policy))
    retry = view.pop("retry")
    rules = {**view, **{f"retry {name}": value for name, value in retry.items()}}
    return [(name.replace("_", " "), str(value)) for name, value in rules.items() if value not in (None, "", False)]


SCREEN = Screen("job", "job.html", look, {"job": "jobs/one.html"})


@router.get("/jobs/{job_id}")
def job(request: Request, job_id: str, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, key=job_id, **SCREEN.values(viewing, job_id))
