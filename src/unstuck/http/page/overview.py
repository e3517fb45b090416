"""The first screen: is everything all right, and if not, what died and why."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.domain.states import LIVING
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.deaths import recent_deaths
from unstuck.http.page.health import sum_up
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render
from unstuck.http.page.tiles import by_trouble, tile_of

MAX_DEATHS = 5
MAX_TILES = 24
MAX_QUEUES = 8

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    deaths = recent_deaths(seen.workers, seen.events, seen.tasks_of, seen.at)
    living = sorted((worker for worker in seen.workers if worker.state in LIVING), key=by_trouble)
    queues = sorted(seen.queues, key=lambda queue: (-(queue.oldest_pending_s or 0.0), queue.name))
    return {
        "health": sum_up(seen, deaths),
        "charts": viewing.charts.of(seen.minutes),
        "deaths": deaths[:MAX_DEATHS],
        "more_deaths": max(0, len(deaths) - MAX_DEATHS),
        "tiles": [tile_of(worker, seen) for worker in living[:MAX_TILES]],
        "more_tiles": max(0, len(living) - MAX_TILES),
        "queues": queues[:MAX_QUEUES],
        "more_queues": max(0, len(queues) - MAX_QUEUES),
    }


SCREEN = Screen(
    "overview",
    "overview.html",
    look,
    {
        "health": "overview/health.html",
        "charts": "overview/charts.html",
        "deaths": "overview/deaths.html",
        "queues": "overview/queues.html",
        "tiles": "overview/tiles.html",
    },
)


@router.get("/")
def overview(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    viewing.lookout.examine()
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
