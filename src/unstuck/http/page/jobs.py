"""Jobs: filters in the address, newest first, page by page by the number of the last one seen."""

from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse
from starlette.responses import Response

from unstuck.client.operator import MAX_JOB_ID
from unstuck.client.searching import Found
from unstuck.domain.durations import seconds
from unstuck.domain.errors import ConfigError, ErrorCode
from unstuck.domain.states import JobState
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render, root_of
from unstuck.store.records import JobFilter

PAGE = 50
MAX_TEXT = 200

router = APIRouter()

Text = Annotated[str, Query(max_length=MAX_TEXT)]


class Asked(msgspec.Struct, frozen=True):
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
        return self != Asked()

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


def asked(
    state: Annotated[list[str] | None, Query(max_length=10)] = None,
    queue: Text = "",
    task: Text = "",
    error: Text = "",
    older: Text = "",
    newer: Text = "",
    worker: Text = "",
) -> Asked:
    states = tuple(dict.fromkeys(word for word in state or [] if word in set(JobState)))
    return Asked(states, queue.strip(), task.strip(), error.strip(), older.strip(), newer.strip(), worker.strip())


SCREEN = Screen("jobs", "jobs.html", lambda viewing, key: {})
"""Not live itself: rows that move under the pointer help nobody. Only the frame around it is."""


@router.get("/jobs")
def jobs(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    where: Annotated[Asked, Depends(asked)],
    before: Annotated[int | None, Query(ge=1, le=MAX_JOB_ID)] = None,
    id: Annotated[str, Query(max_length=MAX_TEXT)] = "",
) -> Response:
    viewing: Viewing = request.app.state.viewing
    number = id.strip().lstrip("#")
    if number.isdecimal():
        return RedirectResponse(f"{root_of(request)}/jobs/{int(number)}", 303)
    wrong = f"A job's number has digits only, not {number!r}." if number else ""
    found = Found([], None)
    try:
        found = viewing.operator().search(where.where(before))
    except ConfigError as error:
        wrong = str(error)
    seen = viewing.snapshot()
    values = {
        **SCREEN.values(viewing),
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
    return render(request, SCREEN.template, room=SCREEN.name, **values)


def describe(where: Asked) -> str:
    """Say in words which jobs a filter means."""
    parts = [f"{', '.join(where.state)} jobs" if where.state else "jobs"]
    parts += [f"of queue {where.queue!r}"] if where.queue else []
    parts += [f"of task {where.task!r}"] if where.task else []
    parts += [f"with {where.error.upper()}"] if where.error else []
    parts += [f"older than {where.older}"] if where.older else []
    parts += [f"newer than {where.newer}"] if where.newer else []
    parts += [f"of worker {where.worker}"] if where.worker else []
    return " ".join(parts)
