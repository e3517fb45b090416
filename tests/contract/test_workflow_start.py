"""Starting a workflow: as a part of the caller's own transaction, and once."""

import threading
from collections.abc import Iterator
from typing import Any

import apsw
import psycopg
import pytest
from tests.support.builders import birth, claim_jobs
from tests.support.builders import run as in_hand

from unstuck import App
from unstuck.client.workflows import Workflow
from unstuck.domain.endings import Attempt, Raised, conclude
from unstuck.domain.policy import Policy
from unstuck.errors import ConfigError, DuplicateJob, TaskFailed
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Turn


@pytest.fixture
def app(ledger: Ledger, url: str) -> Iterator[App]:
    app = App(url, no_workers="ignore")

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    yield app
    app.close()


@pytest.fixture
def connection(ledger: Ledger, url: str, dialect: str) -> Iterator[Any]:
    """Open a connection of the user's own, with a transaction open."""
    if dialect == "postgresql":
        with psycopg.connect(url) as theirs:
            yield theirs
        return
    file = apsw.Connection(url.removeprefix("sqlite:///"))
    file.execute("BEGIN IMMEDIATE")
    yield file
    file.close()


def end(connection: Any, how: str) -> None:
    connection.execute(how)


def build(app: App, **options: Any) -> Workflow:
    add = app.task_by_name("add").options(**options)
    flow = app.workflow("sum")
    flow.add(add, flow.add(add, 1, 2), 3)
    return flow


def test_a_workflow_appears_with_the_callers_commit(app: App, ledger: Ledger, connection: Any) -> None:
    run = build(app, concurrency_key="one").start(connection=connection)
    assert ledger.workflows.get(run.id) is None
    end(connection, "COMMIT")
    found = ledger.workflows.get(run.id)
    assert found is not None
    assert [node.state.value for node in found.nodes if node.kind == "task"] == ["released", "waiting"]
    # A job that joined a concurrency key in an open transaction is admitted after the commit.
    ledger.workers.register(birth())
    ledger.maintenance.promote_due(10)
    claimed = claim_jobs(ledger)
    assert [job.job_id for job in claimed] == [node.job_id for node in found.nodes if node.name == "add"]


def test_a_workflow_goes_with_the_callers_rollback(app: App, ledger: Ledger, connection: Any) -> None:
    run = build(app).start(connection=connection)
    end(connection, "ROLLBACK")
    assert ledger.workflows.get(run.id) is None
    assert ledger.jobs.count() == {}


def test_a_unique_key_finds_the_workflow_of_another_transaction(app: App, connection: Any) -> None:
    first = build(app).start(unique_key="tonight", connection=connection)
    end(connection, "COMMIT")
    connection.execute("BEGIN")
    again = build(app).start(unique_key="tonight", connection=connection)
    end(connection, "COMMIT")
    assert (first.fresh, again.fresh, again.id) == (True, False, first.id)


def test_a_refused_workflow_leaves_the_callers_transaction_as_it_was(app: App, ledger: Ledger, connection: Any) -> None:
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    flow = build(app)
    flow.name = "nul\0"
    with pytest.raises(Exception, match="NUL"):
        flow.start(connection=connection)
    end(connection, "COMMIT")
    assert ledger.jobs.count() == {}
    connection.execute("DROP TABLE orders")
    if isinstance(connection, psycopg.Connection):
        connection.commit()


def test_a_second_start_is_refused_unless_it_is_asked_for(app: App, ledger: Ledger) -> None:
    flow = build(app)
    first = flow.start()
    with pytest.raises(ConfigError, match=f"was started already as {first.id}.*again=True"):
        flow.start()
    assert len(ledger.workflows.list()) == 1
    second = flow.start(again=True)
    assert second.id != first.id
    assert len(ledger.workflows.list()) == 2


def test_of_two_starts_at_once_one_is_refused(app: App, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, refused = build(app), []

    def start_too() -> None:
        try:
            flow.start()
        except ConfigError as error:
            refused.append(str(error))

    other, kind = threading.Thread(target=start_too), type(app.ledger.workflows)
    begin = kind.begin

    def begin_while_another_starts(self: Any, workflow: Any) -> Any:
        if not other.ident:
            other.start()
            # It waits for us, or has started a second workflow by then.
            other.join(0.5)
        return begin(self, workflow)

    monkeypatch.setattr(kind, "begin", begin_while_another_starts)
    first = flow.start()
    other.join()
    assert len(ledger.workflows.list()) == 1
    assert f"was started already as {first.id}" in refused[0]


def test_a_start_that_failed_can_be_repeated(app: App, ledger: Ledger, connection: Any) -> None:
    flow = build(app)
    with pytest.raises(Exception, match="connection= takes"):
        flow.start(connection=object())
    end(connection, "ROLLBACK")
    assert flow.start().fresh


def test_a_workflow_that_fails_names_the_exception_of_its_node(app: App, ledger: Ledger) -> None:
    run = build(app).start()
    ledger.workers.register(birth())
    [job] = in_hand(ledger)
    raised = Raised("KeyError", "'gone'", "Traceback: 'gone'")
    ledger.workers.turn(Turn("w1", endings=(conclude(Attempt(job.job_id, job.token, Policy(), 0, 0), raised),)))
    with pytest.raises(TaskFailed, match="KeyError: 'gone'") as failed:
        run.result(timeout=10)
    assert failed.value.remote_type == "KeyError"
    record = ledger.jobs.get(run.id)
    assert record is not None
    assert record.error is not None
    assert record.error.shown == "KeyError: 'gone'"


def test_the_key_of_an_ordinary_job_starts_no_workflow(app: App, ledger: Ledger) -> None:
    job = app.task_by_name("add").options(unique_key="night").enqueue(1, 2)
    flow = build(app)
    with pytest.raises(DuplicateJob, match=f"Job {job.id} has the unique key 'night' already"):
        flow.start(unique_key="night")
    assert ledger.workflows.list() == []
    assert flow.start(unique_key="day").fresh
