"""An exchange on SQLite stands in the line of those who write only where there is something to write."""

from pathlib import Path

import apsw
import pytest
from tests.support.builders import QUEUE, TASK, birth, new_job, put

from unstuck.config import Settings
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, RemoteHeartbeat, Turn
from unstuck.ledger.sqlite.ledger import SqliteLedger

WISH = ClaimRequest((QUEUE,), (TASK,), 1)


def test_wishes_that_find_nothing_wait_for_nobody_who_writes(tmp_path: Path) -> None:
    ledger = SqliteLedger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    ledger.migrate()
    ledger.workers.register(birth("w1"))
    ledger.db.patience_s = 0.2
    wishes = (Turn("w1", claim_request=WISH), Turn("nobody", claim_request=WISH))
    other = apsw.Connection(str(ledger.db.path))
    other.execute("BEGIN IMMEDIATE")
    answer = ledger.workers.exchange(Exchange(turns=wishes))
    assert answer.turns is not None
    assert [turn.alive for turn in answer.turns] == [True, False]
    for writes in (
        Exchange(jobs=(new_job(),), turns=wishes),
        Exchange(turns=wishes, heartbeats=(RemoteHeartbeat("w1"),)),
    ):
        with pytest.raises(LedgerUnavailable):
            ledger.workers.exchange(writes)
    other.execute("ROLLBACK")
    put(ledger)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable):
        ledger.workers.exchange(Exchange(turns=wishes))
    other.execute("ROLLBACK")
    other.close()
    ledger.close()
