"""What every handler of the HTTP server stands on: the ledger, the settings, and verbs in the caller's name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from unstuck.client.metrics import Meter
from unstuck.client.operator import Operator
from unstuck.client.runtime import ClientRuntime
from unstuck.config import HttpSettings, Settings
from unstuck.domain.api_tokens import Caller
from unstuck.errors import JobNotFound
from unstuck.ledger.contract import Ledger
from unstuck.notify.results import ResultWatcher

SLOW_AT_ONCE = 4
"""So many threads at most do what takes seconds; all other handlers share the rest."""

T = TypeVar("T")


@dataclass(frozen=True)
class Services:
    runtime: ClientRuntime
    http: HttpSettings
    meter: Meter = field(default_factory=Meter)

    @property
    def settings(self) -> Settings:
        return self.runtime.settings

    @property
    def ledger(self) -> Ledger:
        return self.runtime.services().ledger

    @cached_property
    def watcher(self) -> ResultWatcher:
        """Wait for the ends of jobs; unlike the client's own it does not log who waits for long: they are told."""
        return ResultWatcher(
            lambda: self.ledger, lambda job_id: None, lambda job_id: JobNotFound(f"There is no job {job_id}.")
        )

    @cached_property
    def _slow(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(SLOW_AT_ONCE)

    async def run_slow(self, work: Callable[[], T]) -> T:
        """Do what may take seconds: those who ask for it wait for each other, and nobody's beat waits for them."""
        return await anyio.to_thread.run_sync(work, limiter=self._slow)

    def operator(self, caller: Caller) -> Operator:
        """Return an Operator that acts in the name of the caller."""
        return Operator(self.ledger, self.settings, by=caller.name, via=caller.via)


async def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]
