"""A worker may hand in an attempt that it lost together with the one that it has of the same job."""

from tests.contract.hands import birth, claim, crash, done, put, run, start, turn

from unstuck.domain.endings import Release
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, GuardNone, Held


def lost_and_found(ledger: Ledger) -> tuple[Claimed, Claimed]:
    ledger.register(birth("w1"))
    put(ledger)
    [old] = run(ledger)
    assert ledger.settle("w1", [], [Release(old.job_id, old.token)], GuardNone())
    [new] = claim(ledger)
    return old, new


def test_of_two_starts_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    answer = turn(ledger, start=[Held(old.job_id, old.token), Held(new.job_id, new.token)])
    assert answer.superseded == {(old.job_id, old.token)}


def test_of_two_successes_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    start(ledger, [new])
    answer = turn(ledger, done=[done(old, b"old"), done(new, b"new")])
    assert answer.superseded == {(old.job_id, old.token)}
    assert ledger.outcomes([new.job_id])[0].result == b"new"


def test_of_two_endings_of_one_job_the_lost_one_is_named(ledger: Ledger) -> None:
    old, new = lost_and_found(ledger)
    start(ledger, [new])
    assert turn(ledger, endings=[crash(old), crash(new)]).superseded == {(old.job_id, old.token)}
