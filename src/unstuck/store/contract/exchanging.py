"""What a broker asks of the ledger, which speaks for many clients and workers at once."""

from typing import Protocol

from unstuck.store.records import Exchange, ExchangeAnswer, Letter


class ExchangeVerbs(Protocol):
    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        """Do all of it in one commit, or nothing. A turn of a dead worker is answered as such, and the others are done
        all the same. RefusedValue for one value that cannot be stored: split it. Where it only wishes, and there is
        nothing to be had, nobody who writes is made to wait."""
        ...

    def letters(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[Letter]:
        """Give the unanswered letters of a client, in the order of their jobs. They go when their jobs go."""
        ...

    def letter(self, job_id: int) -> Letter | None:
        """Give the letter of a job, answered or not. A job that is enqueued again under its unique key gets the new
        one."""
        ...
