"""The actions of the dashboard: what each form carries, asks and does."""

from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.responses import Response

from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import CANCELLED_BY_DEFAULT, MAX_JOB_ID, RETRIED_BY_DEFAULT
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.limits import limit_in_words, read_limit
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.domain.units import seconds
from unstuck.errors import ConfigError, UnstuckError
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard import rendering
from unstuck.http.dashboard.jobs import JobFilterForm, describe
from unstuck.http.dashboard.pages import View, common
from unstuck.http.dashboard.rendering import count, render, root_of
from unstuck.http.problems import Problem

Action = Callable[[Operator, FormData], tuple[rendering.Level, str]]
Confirmation = Callable[[FormData], tuple[str, str, str]]
"""Gives what to ask, what it will mean, and the word on the button."""


def text(form: FormData, name: str) -> str:
    value = form.get(name)
    return value.strip() if isinstance(value, str) else ""


MAX_NUMBER_CHARS = 10


def _whole(form: FormData, name: str) -> int | None:
    given = text(form, name)
    if not given:
        return None
    # Text is measured first: Python refuses to read numbers of thousands of digits.
    if not (given.isascii() and given.isdecimal()) or len(given) > MAX_NUMBER_CHARS:
        raise ConfigError(f"{name} must be a whole number, not {given[:40]!r}.")
    return int(given)


def _limit_queue(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    queue = text(form, "queue")
    limit = read_limit(_whole(form, "concurrency"), text(form, "rate") or None)
    if not limit:
        return "warning", "Say how many at once, or a rate, or both."
    operator.queues.limit(queue, limit)
    return "good", f"Queue {queue!r}: {limit_in_words(limit)}."


def _free_queue(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    queue = text(form, "queue")
    operator.queues.limit(queue, read_limit(None, None))
    return "good", f"Queue {queue!r} has no limit, whatever its app says."


def _limit_as_declared(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    queue = text(form, "queue")
    operator.queues.limit(queue, None)
    return "good", f"Queue {queue!r} takes its limit from its app again, with the next worker that starts."


def _limit_key(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    key, places = text(form, "line"), _whole(form, "places")
    if places is None:
        return "warning", "Say how many of the key may be at work at once."
    operator.queues.limit_key(key, places)
    return "good", f"Line {key!r}: {count(places, 'job')} at once."


def _key_as_enqueued(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    # Not trimmed: a key may begin or end with a space, and the button carries it as it is.
    given = form.get("line")
    key = given if isinstance(given, str) else ""
    operator.queues.limit_key(key, None)
    return "good", f"Line {key!r} takes its limit from what is enqueued."


LIMIT_ACTIONS: dict[str, Action] = {
    "limit-queue": _limit_queue,
    "free-queue": _free_queue,
    "limit-as-declared": _limit_as_declared,
    "limit-line": _limit_key,
    "line-as-enqueued": _key_as_enqueued,
}
LIMIT_CONFIRMATIONS: dict[str, Confirmation] = {
    "free-queue": lambda form: (
        f"Remove the limit of queue {text(form, 'queue')!r}?",
        "Workers take as much of it as they have room for, whatever its app says.",
        "Remove the limit",
    ),
}


def _pause_schedule(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    name = text(form, "schedule")
    changed = operator.schedules.pause(name)
    return "good", f"Schedule {name!r} is paused." if changed else f"Schedule {name!r} was paused already."


def _resume_schedule(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    name = text(form, "schedule")
    changed = operator.schedules.resume(name)
    return "good", f"Schedule {name!r} goes on with its next tick." if changed else f"Schedule {name!r} was not paused."


def _run_schedule(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    name = text(form, "schedule")
    return "good", f"Schedule {name!r} runs now, beside its ticks: job {operator.schedules.run(name)}."


def _remove_schedule(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    name = text(form, "schedule")
    if operator.schedules.remove(name):
        return "warning", (
            f"Schedule {name!r} is removed. It still stands in the code of living workers, and comes back when one "
            "starts: take it out."
        )
    return "good", f"Schedule {name!r} is removed."


SCHEDULE_ACTIONS: dict[str, Action] = {
    "pause-schedule": _pause_schedule,
    "resume-schedule": _resume_schedule,
    "run-schedule": _run_schedule,
    "remove-schedule": _remove_schedule,
}
SCHEDULE_CONFIRMATIONS: dict[str, Confirmation] = {
    "remove-schedule": lambda form: (
        f"Remove schedule {text(form, 'schedule')!r}?",
        "It enqueues nothing any more. What it enqueued stays.",
        "Remove it",
    ),
}


MAX_JOBS = 1_000
MAX_MATCHING = 10_000
"""So many jobs one press of a button moves at most; it says when there are more."""
MAX_FIELDS = MAX_JOBS + 50
MAX_JOB_ID_CHARS = 20

router = APIRouter()


@router.post("/verbs/{name}")
async def run_action(
    request: Request, name: str, caller: Annotated[Caller, Depends(Requires(Scope.OPERATE))]
) -> Response:
    form = await request.form(max_files=0, max_fields=MAX_FIELDS)
    return await run_in_threadpool(_run_action, request, name, form, caller)


def _run_action(request: Request, name: str, form: FormData, caller: Caller) -> Response:
    verb = ACTIONS.get(name)
    if verb is None:
        raise Problem(404, "not_found", f"There is no verb {name!r}.")
    viewing: View = request.app.state.view
    question = CONFIRMATIONS.get(name)
    if question is not None and form.get("confirmed") != "yes":
        return _ask(request, viewing, name, form, question(form))
    try:
        level, said = verb(viewing.operator(caller.name), form)
    except UnstuckError as error:
        level, said = "problem", str(error)
    viewing.snapshots.forget()
    response = RedirectResponse(_back(request, form), 303)
    rendering.write(response, request, level, said)
    return response


def _ask(request: Request, viewing: View, name: str, form: FormData, asked: tuple[str, str, str]) -> Response:
    kept = [(key, value) for key, value in form.multi_items() if key != "confirmed"]
    title, meaning, button = asked
    return render(
        request,
        "confirm.html",
        **common(viewing.snapshot()),
        verb=name,
        fields=kept,
        title=title,
        meaning=meaning,
        button=button,
        back=_back(request, form),
    )


def _back(request: Request, form: FormData) -> str:
    """Give where to go on: a path of this door, whatever the form says."""
    root = root_of(request)
    back = text(form, "back")
    ours = back.startswith("/") and not back.startswith(("//", "/\\")) and "\n" not in back and "\r" not in back
    return f"{root}{back}" if ours else f"{root}/"


# What the forms carry -------------------------------------------------------------------------


def _age_s(form: FormData) -> float | None:
    age = text(form, "older_than")
    return seconds(age, "The age") if age else None


def _job_ids(form: FormData) -> list[int]:
    given = [value for value in form.getlist("job") if isinstance(value, str)]
    # Text is measured first: Python refuses to read numbers of thousands of digits.
    possible = [int(value) for value in given if value.isdecimal() and len(value) <= MAX_JOB_ID_CHARS]
    return [job_id for job_id in possible if 0 < job_id <= MAX_JOB_ID][:MAX_JOBS]


def _asked(form: FormData) -> JobFilterForm:
    known = {state.value for state in JobState}
    states = tuple(value for value in form.getlist("state") if isinstance(value, str) and value in known)
    return JobFilterForm(states, *(text(form, name) for name in ("queue", "task", "error", "older", "newer", "worker")))


# Jobs -----------------------------------------------------------------------------------------

_ANSWERS = {
    "queued": "queued again",
    "cancelled": "cancelled",
    "requested": "running; its worker was told to stop it",
    "finished": "had ended already",
    "live": "not finished, so not retried",
    "succeeded": "succeeded, so not retried",
    "duplicate": "not queued: its unique key is in use",
    "missing": "not there any more",
}
_GOOD = frozenset({"queued", "cancelled", "requested"})


def _tell(answers: dict[int, str]) -> tuple[rendering.Level, str]:
    if not answers:
        return "warning", "No jobs were chosen."
    tally: dict[str, int] = {}
    for answer in answers.values():
        tally[answer] = tally.get(answer, 0) + 1
    if len(answers) == 1:
        job_id, answer = next(iter(answers.items()))
        said = f"Job {job_id}: {_ANSWERS.get(answer, answer)}."
    else:
        said = "; ".join(f"{count(number, 'job')} {_ANSWERS.get(answer, answer)}" for answer, number in tally.items())
        said = f"{said}."
    return ("good" if set(tally) <= _GOOD else "warning"), said


def _retry(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    return _tell(operator.jobs.retry(_job_ids(form)))


def _cancel(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    return _tell(operator.jobs.cancel(_job_ids(form)))


def _stack(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    ids = _job_ids(form)
    if not ids or not operator.jobs.ask_stack(ids[0]):
        return "warning", "Only what runs has a stack."
    return "good", "Its worker was asked where the job stands; the stack appears below in a moment."


def _matching(operator: Operator, form: FormData, default: tuple[JobState, ...]) -> tuple[list[int], str]:
    where = _asked(form).where()
    found: list[int] = []
    more = ""
    chosen = where if where.states else msgspec.structs.replace(where, states=default)
    for job_id in operator.jobs.matching(chosen):
        if len(found) == MAX_MATCHING:
            more = f" There are more: one press moves at most {MAX_MATCHING:,}."
            break
        found.append(job_id)
    return found, more


def _retry_matching(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    found, more = _matching(operator, form, RETRIED_BY_DEFAULT)
    level, said = _tell(operator.jobs.retry(found)) if found else ("warning", "No jobs match.")
    return level, said + more


def _cancel_matching(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    found, more = _matching(operator, form, CANCELLED_BY_DEFAULT)
    level, said = _tell(operator.jobs.cancel(found)) if found else ("warning", "No jobs match.")
    return level, said + more


def _prune(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    states = [JobState(state) for state in _asked(form).state if JobState(state) in FINAL_STATES]
    removed = operator.jobs.prune(_age_s(form), states)
    return "good", f"Removed {count(removed, 'finished job')}."


# Workflows ------------------------------------------------------------------------------------


def _workflow_id(form: FormData) -> int:
    number = text(form, "workflow")
    return int(number) if number.isdecimal() and len(number) < 20 else 0


def _retry_workflow(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    found = operator.workflows.get(_workflow_id(form))
    if operator.workflows.retry(found.id):
        return "good", f"Workflow {found.id} goes on from what failed."
    return "warning", f"Workflow {found.id} is {found.state}: there is nothing to take up."


def _resume_workflow(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    found = operator.workflows.get(_workflow_id(form))
    if operator.workflows.resume(found.id):
        return "good", f"Workflow {found.id} goes on past what failed."
    return "warning", f"Workflow {found.id} is {found.state}, not paused."


def _cancel_workflow(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    found = operator.workflows.get(_workflow_id(form))
    if operator.workflows.cancel(found.id):
        return "good", f"Workflow {found.id} is cancelled; what runs of it is told to stop."
    return "warning", f"Workflow {found.id} had ended already: {found.state}."


# Queues ---------------------------------------------------------------------------------------


def _pause(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    changed = operator.queues.pause(text(form, "queue") or None)
    return "good", f"Paused: {', '.join(sorted(changed))}." if changed else "Paused already."


def _resume(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    changed = operator.queues.resume(text(form, "queue") or None)
    return "good", f"Resumed: {', '.join(sorted(changed))}." if changed else "Nothing was paused."


def _purge(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    queue = text(form, "queue")
    return "good", f"Cancelled {count(operator.queues.purge(queue), 'pending job')} of queue {queue!r}."


# Workers --------------------------------------------------------------------------------------


def _drain(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    worker = operator.workers.drain(text(form, "worker"))
    return "good", f"Worker {worker.name} was asked to drain: it finishes what it runs and exits."


def _stop(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    worker = operator.workers.stop(text(form, "worker"))
    return "good", f"Worker {worker.name} was asked to stop: it exits within its grace."


def _disable(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    worker, alone = operator.workers.disable(text(form, "worker"), text(form, "reason") or "disabled on the page")
    return _switched_off(f"Worker {worker.name} is disabled: it finishes what it runs and claims nothing.", alone)


def _enable(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    worker, changed = operator.workers.enable(text(form, "worker"))
    if worker.disabled is not None:
        return "warning", f"Worker {worker.name} stays disabled: its host is. Enable the host."
    return "good", f"Worker {worker.name} is enabled." if changed else f"Worker {worker.name} was enabled already."


def _disable_host(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    host = text(form, "host")
    workers, alone = operator.workers.disable_host(host, text(form, "reason") or "disabled on the page")
    return _switched_off(f"Host {host} is disabled, with {count(len(workers), 'living worker')}.", alone)


def _enable_host(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    host = text(form, "host")
    workers, changed = operator.workers.enable_host(host)
    if not changed:
        return "warning", f"Host {host} was not disabled."
    return "good", f"Host {host} is enabled, with {count(len(workers), 'living worker')}."


def _switched_off(said: str, alone: set[str]) -> tuple[rendering.Level, str]:
    if not alone:
        return "good", said
    return "warning", f"{said} Nobody serves {', '.join(sorted(alone))} now."


# Stale ----------------------------------------------------------------------------------------


def _fail_stale(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    return "good", f"Failed {count(len(operator.stale.fail(_age_s(form))), 'stale job')}."


def _requeue_stale(operator: Operator, form: FormData) -> tuple[rendering.Level, str]:
    return "good", f"Gave back {count(len(operator.stale.requeue(_age_s(form))), 'stale job')}."


ACTIONS: dict[str, Action] = {
    "retry": _retry,
    "cancel": _cancel,
    "stack": _stack,
    "retry-matching": _retry_matching,
    "cancel-matching": _cancel_matching,
    "prune": _prune,
    "retry-workflow": _retry_workflow,
    "resume-workflow": _resume_workflow,
    "cancel-workflow": _cancel_workflow,
    "pause": _pause,
    "resume": _resume,
    "purge": _purge,
    "drain": _drain,
    "stop": _stop,
    "disable": _disable,
    "enable": _enable,
    "disable-host": _disable_host,
    "enable-host": _enable_host,
    "fail-stale": _fail_stale,
    "requeue-stale": _requeue_stale,
    **LIMIT_ACTIONS,
    **SCHEDULE_ACTIONS,
}


def _these_jobs(form: FormData) -> str:
    ids = _job_ids(form)
    return f"job {ids[0]}" if len(ids) == 1 else count(len(ids), "job")


CONFIRMATIONS: dict[str, Confirmation] = {
    "cancel": lambda form: (
        f"Cancel {_these_jobs(form)}?",
        "What waits is cancelled at once; what runs is stopped by its worker.",
        "Cancel them" if len(_job_ids(form)) > 1 else "Cancel the job",
    ),
    "cancel-matching": lambda form: (
        f"Cancel all {describe(_asked(form))}?",
        f"Everything unfinished that the filter finds, at most {MAX_MATCHING:,} at once.",
        "Cancel them",
    ),
    "retry-matching": lambda form: (
        f"Retry all {describe(_asked(form))}?",
        f"With fresh counters, at most {MAX_MATCHING:,} at once. Without a state: failed and quarantined ones.",
        "Retry them",
    ),
    "resume-workflow": lambda form: (
        f"Go on past what failed in workflow {_workflow_id(form)}?",
        "Those who depend on it get its error instead of a result.",
        "Go on",
    ),
    "cancel-workflow": lambda form: (
        f"Cancel workflow {_workflow_id(form)}?",
        "What was not begun is cancelled, what runs is told to stop.",
        "Cancel the workflow",
    ),
    "purge": lambda form: (
        f"Purge queue {text(form, 'queue')!r}?",
        "Every job of it that has not begun is cancelled, scheduled ones too. Jobs that run, sleep, wait for a signal "
        "or wait for their next try go on.",
        "Purge",
    ),
    "stop": lambda form: (
        f"Stop worker {text(form, 'worker')}?",
        "It exits within its grace; what does not end by then is killed and settled by its rule.",
        "Stop it",
    ),
    "disable-host": lambda form: (
        f"Disable host {text(form, 'host')!r}?",
        "No worker on it claims jobs any more, those to come included, until it is enabled.",
        "Disable",
    ),
    "prune": lambda form: (
        "Remove finished jobs?",
        f"Those that ended more than {text(form, 'older_than') or 'the retention'} ago, for good.",
        "Remove them",
    ),
    "fail-stale": lambda form: (
        "Fail stale running jobs?",
        "Whatever their tasks say about crashes. Their effects may have happened.",
        "Fail them",
    ),
    "requeue-stale": lambda form: (
        "Give stale jobs back to their queues?",
        "Claimed ones always (their code never ran); running ones only where their task may be retried.",
        "Give them back",
    ),
    **LIMIT_CONFIRMATIONS,
    **SCHEDULE_CONFIRMATIONS,
}
