"""Schedules: look at them, make them, stop and start them, run one now."""

from typing import Annotated

from fastapi import Depends, Path, Response

from unstuck.client.schedule_views import schedule_view
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.scheduling import ScheduleBody, SchedulePaused, ScheduleRemoved, ScheduleRun, ScheduleView

router = api_router("schedules", "/schedules")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]
# Names of schedules may hold a slash.
Name = Annotated[str, Path(min_length=1, description="The schedule.")]


@router.get("", summary="List schedules with their next and last tick", response_model=list[ScheduleView])
def schedules(desk: AtDesk, caller: Reader) -> Response:
    return answer(desk.operator(caller).schedule_views())


@router.post("/{name:path}/pause", summary="Stop a schedule", response_model=SchedulePaused)
def pause(name: Name, desk: AtDesk, caller: Operating) -> Response:
    """What it enqueued runs."""
    return answer({"name": name, "paused": True, "changed": desk.operator(caller).pause_schedule(name)})


@router.post("/{name:path}/resume", summary="Let a schedule go on with its next tick", response_model=SchedulePaused)
def resume(name: Name, desk: AtDesk, caller: Operating) -> Response:
    return answer({"name": name, "paused": False, "changed": desk.operator(caller).resume_schedule(name)})


@router.post("/{name:path}/run", summary="Enqueue the job of a schedule now", response_model=ScheduleRun)
def run(name: Name, desk: AtDesk, caller: Operating) -> Response:
    """Beside its ticks, which go on as they were."""
    return answer({"name": name, "job_id": desk.operator(caller).run_schedule(name)})


@router.put("/{name:path}", summary="Make a schedule, or change one that was made here", response_model=ScheduleView)
def create(name: Name, body: ScheduleBody, desk: AtDesk, caller: Operating) -> Response:
    """Every worker fires it. One that stands in the code of an app is changed there."""
    operator = desk.operator(caller)
    record = operator.create_schedule(name, **body.model_dump())
    return answer(schedule_view(record, operator.workers(living_only=True)))


@router.delete("/{name:path}", summary="Forget a schedule", response_model=ScheduleRemoved)
def remove(name: Name, desk: AtDesk, caller: Operating) -> Response:
    """What it enqueued stays."""
    return answer({"name": name, "removed": True, "workers": desk.operator(caller).remove_schedule(name)})
