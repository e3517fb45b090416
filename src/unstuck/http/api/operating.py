"""Have workers stop, switch them and their hosts off and on. Draining is in `workers`: they may do it themselves."""

from typing import Annotated, Literal

from fastapi import Depends, Path, Response

from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.domain.states import LIVING
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import ReasonBody, SwitchedOff, SwitchedOn, WorkerAsked
from unstuck.http.problems import Problem
from unstuck.store.records import WorkerRecord

router = api_router("workers")

Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]
Who = Annotated[str, Path(min_length=1, description="A worker: its id, the beginning of its id, or its name.")]
HostName = Annotated[str, Path(min_length=1, description="A host, as workers name theirs.")]


@router.post("/workers/{worker}/stop", summary="Have a worker exit within its grace", response_model=WorkerAsked)
def stop(worker: Who, desk: AtDesk, caller: Operating) -> Response:
    """What has not ended by then is killed and settled by `on_crash`, counting for nobody."""
    return ask(desk.operator(caller), worker, "stop")


@router.post("/workers/{worker}/disable", summary="Have a worker take no more jobs", response_model=SwitchedOff)
def disable(worker: Who, desk: AtDesk, caller: Operating, body: ReasonBody | None = None) -> Response:
    """It finishes what it runs, lives on, and can be enabled."""
    operator = desk.operator(caller)
    _living(operator, worker)
    record, unserved = operator.disable_worker(worker, (body or ReasonBody()).reason)
    return _switched_off([record], None, unserved)


@router.post("/workers/{worker}/enable", summary="Let a worker take jobs again", response_model=SwitchedOn)
def enable(worker: Who, desk: AtDesk, caller: Operating) -> Response:
    record, changed = desk.operator(caller).enable_worker(worker)
    still = views.disabled_view(record.disabled)
    return answer({"workers": [record.id], "host": None, "changed": changed, "disabled": still})


@router.post(
    "/hosts/{host}/disable", summary="Have every worker of a host take no more jobs", response_model=SwitchedOff
)
def disable_host(host: HostName, desk: AtDesk, caller: Operating, body: ReasonBody | None = None) -> Response:
    """Also workers that are started there later."""
    here, unserved = desk.operator(caller).disable_host(host, (body or ReasonBody()).reason)
    return _switched_off(here, host, unserved)


@router.post("/hosts/{host}/enable", summary="Let the workers of a host take jobs again", response_model=SwitchedOn)
def enable_host(host: HostName, desk: AtDesk, caller: Operating) -> Response:
    here, changed = desk.operator(caller).enable_host(host)
    return answer({"workers": [worker.id for worker in here], "host": host, "changed": changed, "disabled": None})


def ask(operator: Operator, who: str, what: Literal["drain", "stop"]) -> Response:
    """Ask a living worker to go; the worker itself may ask to be drained too, see `workers`."""
    _living(operator, who)
    worker = operator.ask_worker(who, what)
    return answer({"id": worker.id, "name": worker.name, "request": what})


def _living(operator: Operator, who: str) -> None:
    worker = operator.find_worker(who)
    if worker.state not in LIVING:
        said = f"Worker {worker.name} ({worker.id}) is {worker.state}: there is nobody to ask."
        raise Problem(409, "worker_gone", said, state=worker.state.value)


def _switched_off(here: list[WorkerRecord], host: str | None, unserved: set[str]) -> Response:
    ids = [worker.id for worker in here]
    return answer({"workers": ids, "host": host, "disabled": True, "unserved": sorted(unserved)})
