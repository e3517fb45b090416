"""Lists of jobs, and verbs for many of them at once."""

import itertools
from collections import Counter as Tally
from collections.abc import Callable, Collection
from typing import Annotated

import msgspec
from fastapi import Depends, Query, Response

from unstuck.client import views
from unstuck.client.operator import CANCELLED_BY_DEFAULT, PAGE, RETRIED_BY_DEFAULT, Operator
from unstuck.domain.durations import seconds
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import did_you_mean
from unstuck.domain.states import JobState
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.jobs import JobPage
from unstuck.http.models.operating import BulkAnswer, BulkBody, PruneBody, Pruned, Where
from unstuck.store.records import JobFilter

router = api_router("jobs")


Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]
Age = Annotated[str | None, Query(description="A duration like `10m`, or a number of seconds.")]


@router.get("/jobs", summary="List jobs, newest first", response_model=JobPage)
def jobs(
    desk: AtDesk,
    caller: Reader,
    state: Annotated[
        list[str] | None, Query(description="Of these states; repeat it or use commas.", examples=["failed"])
    ] = None,
    queue: str | None = None,
    task: str | None = None,
    error: Annotated[str | None, Query(examples=["WORKER_CRASHED"])] = None,
    older_than: Age = None,
    newer_than: Age = None,
    worker: Annotated[str | None, Query(description="In the hands of this worker (id or name).")] = None,
    before: Annotated[
        int | None, Query(ge=1, le=2**63 - 1, description="Older than this job: `next` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    """The same conditions as `unstuck jobs`. Pages are cut by number of job, so that they stay as fast however deep.
    Where few of very many match, a page may hold less than `limit`, or nothing, and have a `next`: go on there."""
    operator = desk.operator(caller)
    where = JobFilter(
        states=_states(state or []),
        queue=queue,
        task=task,
        error=error.upper() if error is not None else None,
        older_than_s=_age_s(older_than, "older_than"),
        newer_than_s=_age_s(newer_than, "newer_than"),
        worker_id=operator.find_worker(worker).id if worker is not None else None,
        before_id=before,
        limit=limit,
    )
    found = operator.search(where)
    return answer({"jobs": [views.job_summary(job) for job in found.jobs], "next": found.before_id})


@router.post("/jobs/cancel", summary="Cancel many jobs", response_model=BulkAnswer)
def cancel(body: BulkBody, desk: AtDesk, caller: Operating) -> Response:
    """By number, or all that match: without `state` those that have not ended. Newest first, `limit` at a time."""
    operator = desk.operator(caller)
    ids, more = _chosen(operator, body, CANCELLED_BY_DEFAULT)
    return bulk(ids, more, body.dry_run, operator.cancel)


@router.post("/jobs/retry", summary="Run many finished jobs again", response_model=BulkAnswer)
def retry(body: BulkBody, desk: AtDesk, caller: Operating) -> Response:
    """By number, or all that match: without `state` those that failed or are quarantined."""
    operator = desk.operator(caller)
    ids, more = _chosen(operator, body, RETRIED_BY_DEFAULT)
    return bulk(ids, more, body.dry_run, operator.retry)


@router.post("/prune", summary="Remove finished jobs now", response_model=Pruned, tags=["care"])
def prune(desk: AtDesk, caller: Operating, body: PruneBody | None = None) -> Response:
    """The reaper does it by itself by retention."""
    asked = body or PruneBody()
    age_s = None if asked.older_than is None else seconds(asked.older_than, "older_than")
    return answer({"pruned": desk.operator(caller).prune(age_s, [JobState(state) for state in asked.state])})


def bulk(ids: list[int], more: bool, dry_run: bool, act: Callable[[Collection[int]], dict[int, str]]) -> Response:
    """Do it, or only say which it would be, and give what became of each."""
    done = dict.fromkeys(ids, "matched") if dry_run else act(ids)
    return answer(
        {
            "dry_run": dry_run,
            "matched": len(done),
            "more": more,
            "counts": dict(sorted(Tally(done.values()).items())),
            "answers": [{"id": job_id, "answer": said} for job_id, said in done.items()],
        }
    )


def first_matching(operator: Operator, where: JobFilter, limit: int) -> tuple[list[int], bool]:
    """Give the newest `limit` that match, and whether there are more."""
    # All of them before anything is done: what is done changes what matches.
    ids = list(itertools.islice(operator.matching(where), limit + 1))
    return ids[:limit], len(ids) > limit


def _chosen(operator: Operator, body: BulkBody, default: tuple[JobState, ...]) -> tuple[list[int], bool]:
    if body.ids is not None:
        return list(dict.fromkeys(body.ids)), False
    assert body.where is not None
    where = _filter(operator, body.where)
    return first_matching(operator, msgspec.structs.replace(where, states=where.states or default), body.limit)


def _filter(operator: Operator, where: Where) -> JobFilter:
    return JobFilter(
        states=tuple(where.state),
        queue=where.queue,
        task=where.task,
        error=where.error.upper() if where.error is not None else None,
        older_than_s=None if where.older_than is None else seconds(where.older_than, "older_than"),
        newer_than_s=None if where.newer_than is None else seconds(where.newer_than, "newer_than"),
        worker_id=operator.find_worker(where.worker).id if where.worker is not None else None,
    )


def _states(given: list[str]) -> tuple[JobState, ...]:
    known = [state.value for state in JobState]
    words = [word.strip().lower() for text in given for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ConfigError(f"There is no state {word!r}.{did_you_mean(word, known)} States: {', '.join(known)}.")
    return tuple(JobState(word) for word in words)


def _age_s(text: str | None, what: str) -> float | None:
    return None if text is None else seconds(text, what)
