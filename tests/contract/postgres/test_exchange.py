"""An exchange on PostgreSQL: one round trip, nothing by halves, and nothing lost with an answer."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.support.builders import QUEUE, TASK, birth, done, new_job, put, running, state_of
from tests.support.fleet import wait_for
from tests.support.network_proxy import Proxy

from unstuck.config import Settings
from unstuck.domain.states import JobState, Transport
from unstuck.errors import LedgerError, RefusedValue, UncertainCommit
from unstuck.ledger.contract.jobs import Enqueued, Request
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, OnceJob, RemoteHeartbeat, ReplyAddress, Turn
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.turn import parameters_of

WISH = ClaimRequest((QUEUE,), (TASK,), 1, start=1)
LETTER = ReplyAddress(b"client-0123456789", "echo", "r1")
ONE = b"insert into unstuck.queues (name) values ('one')"


@pytest.fixture
def ledger(pg_ledger: PostgresLedger) -> PostgresLedger:
    pg_ledger.workers.register(birth("w1", suspect_after_s=600, running_stale_after_s=600))
    return pg_ledger


@pytest.fixture
def far(ledger: PostgresLedger, pg_url: str) -> Iterator[tuple[PostgresLedger, Proxy]]:
    """A ledger behind a proxy that can lose answers."""
    with Proxy(pg_url) as proxy:
        far = PostgresLedger(Settings(url=proxy.url))
        far.workers.exchange(Exchange(turns=(Turn("w1"), Turn("w1"))))
        yield far, proxy
        far.close()


def waiting(connection: psycopg.Connection[Any]) -> bool:
    asked = "select count(*) > 0 from pg_locks where not granted and pid <> pg_backend_pid()"
    return connection.execute(asked).fetchone() == (True,)


def names(ledger: PostgresLedger) -> set[str]:
    return {row[0] for row in ledger.db.read_connection.ask(b"select name from unstuck.queues")}


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        ((b"select 1 / %(zero)s", {"zero": 0}), RefusedValue),
        ((b"select * from nowhere", {}), LedgerError),
        ((b"select %(text)s::text", {"text": "nul\0"}), RefusedValue),
        ((b"select %(text)s::text", {"text": "\ud800"}), RefusedValue),
    ],
)
def test_a_statement_that_fails_takes_the_one_before_with_it(
    ledger: PostgresLedger, second: tuple[bytes, dict[str, object]], kind: type[Exception]
) -> None:
    lane = ledger.db.turn_connection
    session = lane.open()
    with pytest.raises(kind):
        lane.write_all([(ONE, {}), second, (b"select 1", {})])
    assert "one" not in names(ledger)
    # On the same connection, and with no transaction left open.
    assert lane.open() is session
    assert lane.write_all([(ONE + b" returning name", {}), (b"select 2", {})]) == [[("one",)], [(2,)]]
    assert "one" in names(ledger)


def test_whatever_interrupts_it_in_the_middle_nothing_is_committed(ledger: PostgresLedger) -> None:
    class Interrupting(dict[str, object]):
        def __getitem__(self, name: str) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.db.turn_connection.write_all([(ONE, {}), (b"select %(x)s", Interrupting(x=1))])
    assert "one" not in names(ledger)
    assert ledger.db.turn_connection.write_all([(b"select 1", {}), (b"select 2", {})]) == [[(1,)], [(2,)]]


def test_a_deadlock_repeats_all_of_it(ledger: PostgresLedger, pg_url: str) -> None:
    first, second = put(ledger), put(ledger)
    touch = b"update unstuck.jobs set enqueued_by = %(by)s where id = %(id)s returning id"
    locked = threading.Event()

    def other_way_round() -> None:
        with psycopg.connect(pg_url) as connection:
            # The lane is found to be the one in the way, and not this one.
            connection.execute("set deadlock_timeout = '60s'")
            connection.execute(touch, {"by": "theirs", "id": second})
            locked.set()
            wait_for(lambda: waiting(connection), "the lane to wait for this one")
            connection.execute(touch, {"by": "theirs", "id": first})

    thread = threading.Thread(target=other_way_round)
    thread.start()
    assert locked.wait(20)
    ledger.db.turn_connection.write_all([(touch, {"by": "ours", "id": first}), (touch, {"by": "ours", "id": second})])
    thread.join()
    assert [record.enqueued_by for job_id in (first, second) if (record := ledger.jobs.get(job_id))] == ["ours", "ours"]


def test_beats_do_not_make_the_rest_of_a_commit_less_durable(ledger: PostgresLedger) -> None:
    ledger.workers.register(birth("f1", transport=Transport.MDP))
    values = {"worker_ids": ["f1"], "running": [1], "settled": [0], "metadata": [None]}
    asked = b"select current_setting('synchronous_commit')"
    for query, expected in (("beat_foreign", "off"), ("beat_foreign_along", "on")):
        with ledger.db.turn_connection.transaction() as connection:
            types = {"worker_ids": "text", "running": "bigint", "settled": "bigint", "metadata": "text"}
            sql = ledger.db.sql[query]
            for name, kind in types.items():
                sql = sql.replace(f"%({name})s".encode(), f"%({name})s::{kind}[]".encode())
            connection.execute(sql, values)
            assert connection.execute(asked).fetchone() == (expected,)


def test_an_exchange_whose_answer_was_lost_still_says_what_it_took_in(far: tuple[PostgresLedger, Proxy]) -> None:
    ledger, proxy = far
    there = put(ledger, unique_key="u", delay_s=600)
    request = Request(b"k", b"f", 600.0)
    proxy.lose_answer_to(b".post_v1(")
    answer = ledger.workers.exchange(
        Exchange(
            jobs=(new_job(), new_job(unique_key="u")),
            reply_addresses=(LETTER, None),
            once=(OnceJob(request, new_job(), LETTER),),
            turns=(Turn("w1", claim_request=WISH),),
        )
    )
    assert proxy.lost.wait(10)
    assert answer.turns is None
    first, known = answer.enqueued
    assert (first.fresh, known) == (True, Enqueued(there, fresh=False))
    assert answer.once[0] is not None
    assert answer.once[0].fresh
    assert ledger.jobs.count() == {"pending": 2, "running": 1}
    assert [one.job_id for one in ledger.workers.reply_addresses(LETTER.client)] == [
        first.job_id,
        answer.once[0].job_id,
    ]
    # It happened, and the list of what is held tells.
    assert [job.job_id for job in ledger.workers.held("w1")] == [first.job_id]


def test_turns_alone_whose_answer_was_lost_say_so(far: tuple[PostgresLedger, Proxy]) -> None:
    ledger, proxy = far
    job = running(ledger)
    proxy.lose_answer_to(b".turn_v1(")
    with pytest.raises(UncertainCommit):
        ledger.workers.exchange(Exchange(turns=(Turn("w1", done=(done(job),)), Turn("w1", claim_request=WISH))))
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


def test_what_has_no_turns_is_certain_in_the_end(far: tuple[PostgresLedger, Proxy]) -> None:
    ledger, proxy = far
    proxy.lose_answer_to(b".enqueue_v1(")
    answer = ledger.workers.exchange(Exchange(jobs=(new_job(),), heartbeats=(RemoteHeartbeat("nobody"),)))
    assert proxy.lost.wait(10)
    assert answer.turns == ()
    assert ledger.jobs.count() == {"pending": 1}
    assert state_of(ledger, answer.enqueued[0].job_id) is JobState.PENDING


def test_wishes_that_find_nothing_write_nothing(ledger: PostgresLedger) -> None:
    """No transaction number is drawn, so nobody waits for a disk."""
    asked = b"select pg_current_xact_id_if_assigned() is null"
    wish = (ledger.db.sql["turn"], parameters_of(ledger.gaps, Turn("w1", claim_request=WISH)))
    assert ledger.db.turn_connection.write_all([wish, wish, (asked, {})])[-1] == [(True,)]
    put(ledger)
    assert ledger.db.turn_connection.write_all([wish, wish, (asked, {})])[-1] == [(False,)]


def test_large_payloads_come_along(ledger: PostgresLedger) -> None:
    payloads = [bytes([n]) * 300_000 for n in range(3)]
    answer = ledger.workers.exchange(
        Exchange(
            jobs=tuple(new_job(payload=payload) for payload in payloads),
            turns=(
                Turn("w1", claim_request=WISH),
                Turn("w1", claim_request=ClaimRequest((QUEUE,), (TASK,), 2, start=2)),
            ),
        )
    )
    assert answer.turns is not None
    assert [job.payload for turn in answer.turns for job in turn.claimed] == payloads
