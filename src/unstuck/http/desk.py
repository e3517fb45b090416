"""What every handler of the web door stands on: the ledger, the settings, and verbs in the caller's name."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from fastapi import Depends, Request

from unstuck.client.counter import Counter
from unstuck.client.measuring import Meter
from unstuck.client.operator import Operator
from unstuck.config import Settings, Web
from unstuck.domain.errors import JobNotFound
from unstuck.http.callers import Caller
from unstuck.notify.waiting import Watcher
from unstuck.store.contract import Ledger


@dataclass(frozen=True)
class Desk:
    counter: Counter
    web: Web
    meter: Meter = field(default_factory=Meter)

    @property
    def settings(self) -> Settings:
        return self.counter.settings

    @property
    def ledger(self) -> Ledger:
        return self.counter.parts().ledger

    @cached_property
    def watcher(self) -> Watcher:
        """Wait for the ends of jobs; unlike the client's own it does not log who waits for long: they are told."""
        return Watcher(
            lambda: self.ledger, lambda job_id: None, lambda job_id: JobNotFound(f"There is no job {job_id}.")
        )

    def operator(self, caller: Caller) -> Operator:
        """Give the operator's verbs; what is done is written down under the caller's name."""
        return Operator(self.ledger, self.settings, by=caller.name, door=caller.door)


async def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


AtDesk = Annotated[Desk, Depends(desk_of)]
