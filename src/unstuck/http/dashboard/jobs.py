"""Pages of jobs: the list with filters, and one job."""

from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from unstuck.client import views
from unstuck.client.operator.jobs import MAX_JOB_ID, JobPage
from unstuck.client.why.autopsies import brief_cause
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.events import EventKind
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.domain.units import brief, brief_size, seconds
from unstuck.errors import ConfigError, ErrorCode, JobNotFound
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.charts import timeline
from unstuck.http.dashboard.overview import RunningJob
from unstuck.http.dashboard.pages import Page, View
from unstuck.http.dashboard.rendering import render, root_of
from unstuck.ledger.contract.jobs import AttemptRecord, JobFilter, JobRecord, OutputRecord

PAGE = 50
MAX_TEXT = 200

router = APIRouter()

Text = Annotated[str, Query(max_length=MAX_TEXT)]


class JobFilterForm(msgspec.Struct, frozen=True):
    """What a filter says, as it stands in the address."""

    state: tuple[str, ...] = ()
    queue: str = ""
    task: str = ""
    error: str = ""
    older: str = ""
    newer: str = ""
    worker: str = ""

    @property
    def any(self) -> bool:
        return self != JobFilterForm()

    def query(self, **more: Any) -> str:
        named = [("state", state) for state in self.state]
        texts = ("queue", "task", "error", "older", "newer", "worker")
        named += [(name, getattr(self, name)) for name in texts if getattr(self, name)]
        return urlencode([*named, *((name, value) for name, value in more.items() if value is not None)])

    def where(self, before_id: int | None = None, limit: int = PAGE) -> JobFilter:
        """Give the ledger's filter; ConfigError where an age cannot be read."""
        known = {state.value for state in JobState}
        return JobFilter(
            states=tuple(JobState(state) for state in self.state if state in known),
            queue=self.queue or None,
            task=self.task or None,
            error=self.error.upper() or None,
            older_than_s=seconds(self.older, "The age") if self.older else None,
            newer_than_s=seconds(self.newer, "The age") if self.newer else None,
            worker_id=self.worker or None,
            before_id=before_id,
            limit=limit,
        )


def job_filter_form(
    state: Annotated[list[str] | None, Query(max_length=10)] = None,
    queue: Text = "",
    task: Text = "",
    error: Text = "",
    older: Text = "",
    newer: Text = "",
    worker: Text = "",
) -> JobFilterForm:
    states = tuple(dict.fromkeys(word for word in state or [] if word in set(JobState)))
    return JobFilterForm(
        states, queue.strip(), task.strip(), error.strip(), older.strip(), newer.strip(), worker.strip()
    )


JOBS_PAGE = Page("jobs", "jobs.html", lambda viewing, key: {})
"""Not live itself: rows that move under the pointer help nobody. Only the frame around it is."""


@router.get("/jobs")
def jobs(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    where: Annotated[JobFilterForm, Depends(job_filter_form)],
    before: Annotated[int | None, Query(ge=1, le=MAX_JOB_ID)] = None,
    id: Annotated[str, Query(max_length=MAX_TEXT)] = "",
) -> Response:
    viewing: View = request.app.state.view
    number = id.strip().lstrip("#")
    if number.isdecimal():
        return RedirectResponse(f"{root_of(request)}/jobs/{int(number)}", 303)
    wrong = f"A job's number has digits only, not {number!r}." if number else ""
    found = JobPage([], None)
    try:
        found = viewing.operator().jobs.search(where.where(before))
    except ConfigError as error:
        wrong = str(error)
    seen = viewing.snapshot()
    values = {
        **JOBS_PAGE.values(viewing),
        "asked": where,
        "found": found.jobs,
        "looked_back_to": found.before_id if len(found.jobs) < PAGE else None,
        "names": {worker.id: worker.name for worker in seen.workers},
        "states": [state.value for state in JobState],
        "queue_names": [queue.name for queue in seen.queues],
        "task_names": sorted({task for worker in seen.workers for task in worker.tasks}),
        "codes": [code.value for code in ErrorCode],
        "next_query": where.query(before=found.before_id) if found.before_id is not None else None,
        "first_query": where.query() if before is not None else None,
        "wrong": wrong,
    }
    return render(request, JOBS_PAGE.template, room=JOBS_PAGE.name, **values)


def describe(where: JobFilterForm) -> str:
    """Say in words which jobs a filter means."""
    parts = [f"{', '.join(where.state)} jobs" if where.state else "jobs"]
    parts += [f"of queue {where.queue!r}"] if where.queue else []
    parts += [f"of task {where.task!r}"] if where.task else []
    parts += [f"with {where.error.upper()}"] if where.error else []
    parts += [f"older than {where.older}"] if where.older else []
    parts += [f"newer than {where.newer}"] if where.newer else []
    parts += [f"of worker {where.worker}"] if where.worker else []
    return " ".join(parts)


EVENTS_LOOKED_AT = 50
MAX_OUTPUT_CHARS = 50_000


def job_data(viewing: View, key: str) -> dict[str, Any]:
    if not key.isdecimal() or len(key) > 19:
        raise JobNotFound(f"There is no job {key!r}.")
    seen = viewing.snapshot()
    operator = viewing.operator()
    story = operator.why(int(key), workers=seen.workers, queues=seen.queues)
    job = story.job
    ledger = viewing.services.ledger
    attempts = ledger.jobs.attempts(job.id)
    events = ledger.events.list(job_id=job.id, limit=EVENTS_LOOKED_AT) if job.state is JobState.RUNNING else []
    progress = views.progress_of(job, ledger.jobs.progress([job.id]).get(job.id), attempts)
    args, kwargs = views.shown_call(job, viewing.redact)
    return {
        "job": job,
        "place": operator.workflows.node_of(job.id),
        "story": story,
        "attempts": attempts,
        "timeline": timeline(job, attempts, seen.at),
        "stacks": [event for event in events if event.kind == EventKind.STACK and event.at >= (job.started_at or 0.0)],
        "may_ask_stack": job.state is JobState.RUNNING,
        "tries": _tries(attempts, ledger.jobs.outputs(job.id)),
        "names": {worker.id: worker.name for worker in seen.workers},
        "progress": RunningJob(job, progress),
        "args": args,
        "kwargs": kwargs,
        "result": viewing.redact(views.result_view(job)),
        "has_result": job.state is JobState.SUCCEEDED,
        "policy": _rules(job),
        "final": job.state in FINAL_STATES,
        "may_retry": job.state in (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED),
        "may_cancel": job.state not in FINAL_STATES,
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


JOB_PAGE = Page("job", "job.html", job_data, {"job": "jobs/one.html"})


@router.get("/jobs/{job_id}")
def job(request: Request, job_id: str, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, JOB_PAGE.template, room=JOB_PAGE.name, key=job_id, **JOB_PAGE.values(viewing, job_id))
