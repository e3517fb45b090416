"""No number of a job or an attempt is given out twice, whichever standby takes over."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from tests.support.builders import birth, claim_jobs, put

from unstuck.config import Settings
from unstuck.ledger.postgres.ledger import PostgresLedger

SKIPPED_AT_LEAST = 10**9
"""What `first_after_restore` skips in any case."""


@contextmanager
def opened(pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=pg_url))
    try:
        ledger.migrate()
        yield ledger
    finally:
        ledger.close()


def numbers_of(ledger: PostgresLedger) -> tuple[int, int]:
    """Enqueue and claim a job, and return its id and the token."""
    job_id = put(ledger)
    claimed = claim_jobs(ledger)
    assert claimed, f"the number {job_id} was given out before"
    return job_id, claimed[0].token


def test_two_standbys_that_take_over_from_the_same_state_give_out_different_numbers(pg_url: str) -> None:
    with opened(pg_url) as ledger, psycopg.connect(pg_url, autocommit=True) as by_hand:
        ledger.workers.register(birth("w1"))
        lost = numbers_of(ledger)

        def promote(replayed: tuple[int, int]) -> tuple[int, int]:
            """Return the first numbers of a standby that has replayed no more than this."""
            by_hand.execute("update unstuck.ledger set numbered_on = 'before'")
            by_hand.execute("select setval('unstuck.job_ids', %s), setval('unstuck.tokens', %s)", replayed)
            with opened(pg_url) as promoted:
                return numbers_of(promoted)

        first, second = promote(lost), promote(lost)
        assert all(number > old + SKIPPED_AT_LEAST for number, old in zip(first, lost, strict=True))
        # As many as the first one may have given out before it was lost in turn.
        assert all(number > old + 1000 for number, old in zip(second, first, strict=True))
        # And again soon after that, when their numbers are not far behind the clock.
        third, fourth = promote(second), promote(second)
        assert all(number > old + SKIPPED_AT_LEAST for number, old in zip(third, second, strict=True))
        assert all(number > old + 1000 for number, old in zip(fourth, third, strict=True))
