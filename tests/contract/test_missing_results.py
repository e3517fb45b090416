"""A success whose result is not stored says so at every door, and is never taken for a task that returned None."""

import asyncio

import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import done, running, turn
from tests.support.http_server import serving
from typer.testing import CliRunner

from unstuck import App, ResultNotAvailable
from unstuck.cli.main import app as cli
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.mdp.broker.jobs import error_map, is_user_error

CODE = "RESULT_NOT_AVAILABLE"


@pytest.fixture
def lost(ledger: Ledger, w1: str, meddler: Backdoor, dialect: str) -> int:
    """Return a job that succeeded and whose result a person, or a partial restore, removed."""
    job = running(ledger)
    turn(ledger, done=[done(job)])
    table = "unstuck_jobs" if dialect == "sqlite" else "unstuck.jobs"
    assert meddler.rows(f"UPDATE {table} SET result = NULL WHERE id = {job.job_id} RETURNING id")
    return job.job_id


@pytest.fixture
def returned_none(ledger: Ledger, w1: str) -> int:
    job = running(ledger)
    turn(ledger, done=[done(job, b"null")])
    return job.job_id


def test_the_one_who_waits_gets_the_error(url: str, lost: int, returned_none: int) -> None:
    app = App(url)
    with pytest.raises(ResultNotAvailable) as found:
        app.job(lost).result(timeout=10)
    assert (found.value.code, found.value.job_id) == (CODE, lost)
    with pytest.raises(ResultNotAvailable):
        asyncio.run(app.job(lost).result_async(timeout=10))
    assert app.job(returned_none).result(timeout=10) is None
    app.close()


def test_the_ledger_tells_it_alike_in_records_and_outcomes(ledger: Ledger, lost: int, returned_none: int) -> None:
    record = ledger.jobs.get(lost)
    assert record is not None
    assert record.error is not None
    assert record.error.code == CODE
    # Lists leave results out, and say nothing of them.
    assert [job.error for job in ledger.jobs.list(JobFilter())] == [None, None]
    [outcome, fine] = sorted(ledger.jobs.outcomes([lost, returned_none]), key=lambda one: one.job_id)
    assert (outcome.error, fine.error) == (record.error, None)
    # A client over ZeroMQ gets a reply that says so.
    assert is_user_error(outcome)
    assert error_map(outcome, "7")["error"] == CODE


@pytest.mark.usefixtures("restored_logging")
def test_http_and_the_command_line_show_it(url: str, lost: int, returned_none: int) -> None:
    with serving(url) as client:
        said = client.get(f"/api/v1/jobs/{lost}/result").json()
        assert (said["state"], said["result"], said["error"]["code"]) == ("succeeded", None, CODE)
        assert client.get(f"/api/v1/jobs/{lost}").json()["error"]["code"] == CODE
        fine = client.get(f"/api/v1/jobs/{returned_none}/result").json()
        assert (fine["state"], fine["result"], fine["error"]) == ("succeeded", None, None)
    shown = CliRunner().invoke(cli, ["job", str(lost), "--url", url])
    assert shown.exit_code == 0
    assert CODE in shown.output
    why = CliRunner().invoke(cli, ["why", str(lost), "--url", url])
    assert "ResultNotAvailable" in why.output
    assert "unstuck cancel" not in why.output
    assert CODE not in CliRunner().invoke(cli, ["job", str(returned_none), "--url", url]).output
