"""A job can be part of the caller's own transaction, and of nothing else."""

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.support.builders import new_job

from unstuck.domain.states import JobState
from unstuck.errors import LedgerError, SchemaMismatch
from unstuck.ledger.contract.jobs import Enqueued
from unstuck.ledger.postgres.ledger import PostgresLedger

JOBS = [new_job(), new_job(unique_key="once"), new_job(unique_key="once")]


@pytest.fixture
def engine(pg_url: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(pg_url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def pending(ledger: PostgresLedger) -> int:
    return ledger.jobs.count().get(JobState.PENDING, 0)


def test_jobs_appear_with_the_commit_of_a_psycopg_connection(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url, row_factory=dict_row) as connection:
        answer = pg_ledger.jobs.enqueue_on(connection, JOBS)
        assert answer == [Enqueued(1), Enqueued(2), Enqueued(2, fresh=False)]
        assert pending(pg_ledger) == 0
        connection.commit()
        assert pending(pg_ledger) == 2
        pg_ledger.jobs.enqueue_on(connection, [new_job()])
        connection.rollback()
    assert pending(pg_ledger) == 2


def test_a_transaction_block_of_an_autocommit_connection_will_do(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        with pytest.raises(LedgerError, match="Begin one first"):
            pg_ledger.jobs.enqueue_on(connection, JOBS)
        with connection.transaction(force_rollback=True):
            pg_ledger.jobs.enqueue_on(connection, JOBS)
        assert pending(pg_ledger) == 0
        with connection.transaction():
            pg_ledger.jobs.enqueue_on(connection, JOBS)
    assert pending(pg_ledger) == 2


def test_jobs_appear_with_the_commit_of_sqlalchemy(pg_ledger: PostgresLedger, engine: sqlalchemy.Engine) -> None:
    with engine.connect() as connection:
        pg_ledger.jobs.enqueue_on(connection, [new_job()])
        assert pending(pg_ledger) == 0
        connection.commit()
    assert pending(pg_ledger) == 1
    with engine.begin() as connection:
        pg_ledger.jobs.enqueue_on(connection, [new_job()])
    assert pending(pg_ledger) == 2
    with Session(engine) as session:
        pg_ledger.jobs.enqueue_on(session, [new_job()])
        session.rollback()
        pg_ledger.jobs.enqueue_on(session, [new_job()])
        session.commit()
    assert pending(pg_ledger) == 3


def test_a_refused_job_leaves_the_callers_transaction_alive(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url) as connection:
        connection.execute("create table mine (id int)")
        with pytest.raises(LedgerError):
            pg_ledger.jobs.enqueue_on(connection, [new_job(), new_job(enqueued_by="nul\0")])
        connection.execute("insert into mine values (1)")
    assert pending(pg_ledger) == 0


def test_other_things_are_refused_by_name(pg_ledger: PostgresLedger, pg_url: str, engine: sqlalchemy.Engine) -> None:
    for stranger in (object(), "postgresql://", engine, sqlalchemy.create_engine("sqlite://").connect()):
        with pytest.raises(LedgerError, match="connection= takes"):
            pg_ledger.jobs.enqueue_on(stranger, JOBS)
    closed = psycopg.connect(pg_url)
    closed.close()
    with pytest.raises(LedgerError, match="closed"):
        pg_ledger.jobs.enqueue_on(closed, JOBS)


def test_asyncio_connections_are_refused_with_what_works(pg_ledger: PostgresLedger, pg_url: str) -> None:
    url = pg_url.replace("postgresql://", "postgresql+psycopg://")

    async def try_all() -> dict[str, str]:
        said: dict[str, str] = {}

        def refused(connection: object, name: str) -> None:
            with pytest.raises(LedgerError) as caught:
                pg_ledger.jobs.enqueue_on(connection, [new_job()])
            said[name] = str(caught.value)

        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            refused(session, "AsyncSession")
            await session.run_sync(refused, "Session in run_sync")
            # The transaction of the caller is as it was.
            assert (await session.execute(sqlalchemy.text("select 1"))).scalar() == 1
        async with engine.connect() as connection:
            refused(connection, "AsyncConnection")
            await connection.run_sync(refused, "Connection in run_sync")
        await engine.dispose()
        async with await psycopg.AsyncConnection.connect(pg_url) as driver:
            refused(driver, "psycopg.AsyncConnection")
        return said

    said = asyncio.run(try_all())
    assert len(said) == 5
    for name, sentence in said.items():
        assert "asyncio connections are not supported yet, not even through run_sync" in sentence, name
        assert "asyncio.to_thread" in sentence, name
        assert "after your own commit (await task.enqueue_async(…))" in sentence, name
    assert pending(pg_ledger) == 0


def test_a_sync_session_in_a_thread_works_for_asyncio(pg_ledger: PostgresLedger, engine: sqlalchemy.Engine) -> None:
    def order() -> None:
        with Session(engine) as session, session.begin():
            session.execute(sqlalchemy.text("create table orders (id integer)"))
            pg_ledger.jobs.enqueue_on(session, [new_job()])
            assert pending(pg_ledger) == 0

    async def handle() -> None:
        await asyncio.to_thread(order)

    asyncio.run(handle())
    assert pending(pg_ledger) == 1


def test_a_connection_to_a_database_without_the_ledger_is_told_so(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url.rpartition("/")[0] + "/postgres") as elsewhere, pytest.raises(SchemaMismatch):
        pg_ledger.jobs.enqueue_on(elsewhere, JOBS)


def test_a_connection_with_another_encoding_must_not_change_the_words(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url, client_encoding="LATIN1") as theirs:
        with pytest.raises(LedgerError, match="client_encoding=UTF8"):
            pg_ledger.jobs.enqueue_on(theirs, [new_job(unique_key="Größe 3 €")])
        [plain] = pg_ledger.jobs.enqueue_on(theirs, [new_job(unique_key="size 3")])
    record = pg_ledger.jobs.get(plain.job_id)
    assert record is not None
    assert record.unique_key == "size 3"
