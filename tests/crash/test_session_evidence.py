"""A worker on another host whose database session is cut, and comes back: nobody may take it for dead."""

from pathlib import Path

import psycopg
from tests.fleet import Fleet, wait_for

from unstuck.config import Recovery
from unstuck.domain.states import WorkerState
from unstuck.reaper import Reaper

CUTS = 2


class Foreign(Reaper):
    """A reaper that sees every worker as if on another host."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.ledger, Recovery(), by="far away")
        self.witness.is_neighbour = lambda worker: False  # type: ignore[method-assign]


def test_a_living_worker_whose_session_is_cut_is_not_taken_for_dead(ready_pg_url: str, tmp_path: Path) -> None:
    fleet = Fleet(ready_pg_url, tmp_path)
    try:
        worker_id = fleet.start("--no-reaper").id
        reaper = Foreign(fleet)
        with psycopg.connect(ready_pg_url, autocommit=True) as admin:

            def session() -> int:
                row = admin.execute("select session_pid from unstuck.vitals where worker_id = %s", (worker_id,))
                [(pid,)] = row.fetchall()
                return int(pid)

            for _ in range(CUTS):
                before = session()
                admin.execute("select pg_terminate_backend(%s)", (before,))

                def back(before: int = before) -> bool:
                    reaper.round(ticket=False)
                    seen = next(seen for seen in fleet.ledger.watch() if seen.id == worker_id)
                    assert seen.state is not WorkerState.DEAD, "a living worker was taken for dead"
                    return session() != before and seen.state is WorkerState.ACTIVE

                wait_for(back, "the worker back with a new session")
    finally:
        fleet.close()
