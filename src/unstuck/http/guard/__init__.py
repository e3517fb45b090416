"""Who may come in: the Host that was asked for, the token or login, the origin of unsafe requests, limits."""

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI

from unstuck.http.desk import Desk
from unstuck.http.guard import login
from unstuck.http.guard.doorman import Doorman
from unstuck.http.guard.keyring import Keyring
from unstuck.http.guard.place import Place
from unstuck.http.guard.rates import Rates
from unstuck.http.guard.routes import KnownRoutes
from unstuck.http.guard.shared import Member


def stand_guard(door: FastAPI, place: Place, routers: Iterable[APIRouter], member: Member) -> None:
    desk: Desk = door.state.desk
    # The ledger is opened by the first who needs it, in a thread.
    door.state.keyring = Keyring(lambda: desk.ledger.api_tokens(), desk.web.token)
    door.state.mistakes = Rates(login.MISTAKES_PER_S, login.MISTAKES_AT_ONCE, shared=member.group.mistakes)
    door.include_router(login.router, include_in_schema=False)
    routes = KnownRoutes([*routers, login.router])
    door.add_middleware(Doorman, desk=desk, keyring=door.state.keyring, place=place, routes=routes, member=member)
