"""One job: its story, its attempts in time, its autopsies, output, progress and arguments."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.client import views
from unstuck.client.operator import Seen
from unstuck.client.why.endings import brief_cause
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.durations import brief
from unstuck.domain.errors import JobNotFound
from unstuck.domain.events import EventKind
from unstuck.domain.policy import decode_policy
from unstuck.domain.sizes import brief_size
from unstuck.domain.states import FINAL, JobState
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render
from unstuck.http.page.tiles import RunningJob
from unstuck.http.page.timeline import timeline
from unstuck.store.records import AttemptRecord, JobRecord, OutputRecord

EVENTS_LOOKED_AT = 50
MAX_OUTPUT_CHARS = 50_000

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    if not key.isdecimal() or len(key) > 19:
        raise JobNotFound(f"There is no job {key!r}.")
    seen = viewing.snapshot()
    operator = viewing.operator()
    story = operator.why(int(key), Seen(seen.workers, seen.queues))
    job = story.job
    ledger = viewing.desk.ledger
    attempts = ledger.attempts(job.id)
    events = ledger.events(job_id=job.id, limit=EVENTS_LOOKED_AT) if job.state is JobState.RUNNING else []
    progress = views.progress_of(job, ledger.progress([job.id]).get(job.id), attempts)
    args, kwargs = views.shown_call(job, viewing.redact)
    return {
        "job": job,
        "place": operator.place_in_workflow(job.id),
        "story": story,
        "attempts": attempts,
        "timeline": timeline(job, attempts, seen.at),
        "stacks": [event for event in events if event.kind == EventKind.STACK and event.at >= (job.started_at or 0.0)],
        "may_ask_stack": job.state is JobState.RUNNING,
        "tries": _tries(attempts, ledger.outputs(job.id)),
        "names": {worker.id: worker.name for worker in seen.workers},
        "progress": RunningJob(job, progress),
        "args": args,
        "kwargs": kwargs,
        "result": viewing.redact(views.result_view(job)),
        "has_result": job.state is JobState.SUCCEEDED,
        "policy": _rules(job),
        "final": job.state in FINAL,
        "may_retry": job.state in (JobState.FAILED, JobState.CANCELLED),
        "may_release": job.state is JobState.QUARANTINED,
        "may_cancel": job.state not in FINAL,
    }


def _tries(attempts: list[AttemptRecord], outputs: list[OutputRecord]) -> list[dict[str, Any]]:
    """Give, newest first, the attempts of which there is more to tell than their line in the table."""
    printed = {output.token: views.output_view(output) for output in outputs}
    told = []
    for number, one in enumerate(attempts, 1):
        output = printed.get(one.token, {"stdout": "", "stderr": ""})
        autopsy = one.autopsy
        if autopsy is None and not output["stdout"] and not output["stderr"]:
            continue
        told.append(
            {
                "number": number,
                "token": one.token,
                "autopsy": None if autopsy is None else _autopsy(autopsy),
                # What was still in the hands of a process that died is in its autopsy alone.
                "stdout": _end_of(output["stdout"] or (autopsy.stdout if autopsy is not None else "")),
                "stderr": _end_of(output["stderr"] or (autopsy.stderr if autopsy is not None else "")),
            }
        )
    return told[::-1]


def _autopsy(autopsy: Autopsy) -> dict[str, Any]:
    return {"cause": brief_cause(autopsy), "rule": autopsy.rule, "body": autopsy}


def _end_of(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    return f"… {len(text) - MAX_OUTPUT_CHARS:,} characters left out …\n{text[-MAX_OUTPUT_CHARS:]}"


def _rules(job: JobRecord) -> list[tuple[str, str]]:
    """Give the rules that are stored with the job, as people write them."""
    policy = decode_policy(job.policy)
    tries = policy.retry.max_attempts
    crash = f"retry, at most {policy.max_crash_retries} times" if policy.on_crash == "retry" else policy.on_crash
    rules = [("On crash", crash), ("Tries", f"{tries}, {policy.retry.backoff} backoff" if tries > 1 else "1")]
    for name in ("timeout_s", "heartbeat_timeout_s", "stall_timeout_s", "interpreter_timeout_s"):
        value = getattr(policy, name, None)
        if value is not None:
            rules.append((name.removesuffix("_s").replace("_", " ").capitalize(), brief(value)))
    if policy.memory_limit_bytes is not None:
        rules.append(("Memory limit", brief_size(policy.memory_limit_bytes)))
    if policy.overlap == "never":
        rules.append(("Overlap", "never"))
    return rules


SCREEN = Screen("job", "job.html", look, {"job": "jobs/one.html"})


@router.get("/jobs/{job_id}")
def job(request: Request, job_id: str, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, key=job_id, **SCREEN.values(viewing, job_id))
