"""The whole at a glance: what is wrong, what there is to run, how much waits."""

from collections import Counter as Tally
from typing import Annotated

from fastapi import Depends, Response

from unstuck.client import views
from unstuck.client.doctor.visiting import visit_open
from unstuck.domain.policy import decode_policy
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import FindingView, OverviewView, TaskView
from unstuck.version import VERSION

router = api_router("care")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]


@router.get("/doctor", summary="What is wrong, why, and the cure; the worst first", response_model=list[FindingView])
async def doctor(desk: AtDesk, caller: Reader) -> Response:
    """Empty where all is well. Takes a moment longer where a worker seems to do nothing: it is looked at twice."""
    return answer(await desk.slowly(lambda: visit_open(desk.ledger, desk.settings)))


@router.get("/tasks", summary="Tasks that living or past workers know", response_model=list[TaskView])
def tasks(desk: AtDesk, caller: Reader) -> Response:
    return answer(
        [
            {
                "name": task.name,
                "queue": task.queue,
                "is_async": task.is_async,
                "policy": views.policy_view(decode_policy(task.policy)),
            }
            for task in sorted(desk.ledger.tasks(), key=lambda task: task.name)
        ]
    )


@router.get("/overview", summary="How much waits and runs, and who works", response_model=OverviewView)
def overview(desk: AtDesk, caller: Reader) -> Response:
    queues = sorted(desk.ledger.queues(), key=lambda queue: queue.name)
    limits = {record.name: record for record in desk.ledger.queue_limits()}
    return answer(
        {
            "version": VERSION,
            "ledger": desk.ledger.describe(),
            "jobs": {
                state: sum(getattr(queue, state) for queue in queues)
                for state in ("pending", "blocked", "scheduled", "claimed", "running", "waiting")
            },
            "workers": dict(sorted(Tally(worker.state.value for worker in desk.ledger.workers()).items())),
            "queues": [views.queue_view(queue, limits.get(queue.name)) for queue in queues],
        }
    )
