"""What every door shows of jobs and workers agrees with the ledger at that moment."""

from typing import Any

from tests.support.builders import claim_jobs, crash, done, failure, put, running, turn

from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.autopsy import Autopsy, DeathKind, ProgressMark
from unstuck.domain.liveness import Detector
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Progress
from unstuck.ledger.contract.workers import Heartbeat


def shown(ledger: Ledger, url: str, job_id: int) -> Any:
    return Operator(ledger, Settings(url=url)).jobs.detail(job_id)["progress"]


def test_progress_is_shown_until_a_job_succeeds(ledger: Ledger, w1: str, url: str) -> None:
    good, bad = running(ledger), running(ledger)
    ledger.workers.note_progress("w1", [Progress(one.job_id, one.token, 5.0, 137, 150, "", 4.0) for one in (good, bad)])
    assert shown(ledger, url, good.job_id)["done"] == 137
    assert shown(ledger, url, good.job_id)["busy_since"] is not None
    turn(ledger, done=[done(good)], endings=[failure(bad)])
    assert shown(ledger, url, good.job_id) is None, "it is done, whatever it said last"
    assert (shown(ledger, url, bad.job_id)["done"], shown(ledger, url, bad.job_id)["busy_since"]) == (137, None)


def test_of_a_try_that_died_the_report_of_its_death_knows_how_far_it_was(ledger: Ledger, w1: str, url: str) -> None:
    job = running(ledger)
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 37, 150, "half", 4.0)])
    death = Autopsy(DeathKind.SIGNAL, "killed", Detector.RUNNER, progress=ProgressMark(46, 150, "more", 6.0))
    turn(ledger, endings=[crash(job, autopsy=death)])
    told = shown(ledger, url, job.job_id)
    assert (told["done"], told["message"], told["busy_since"]) == (46, "more", None)


def test_a_worker_is_as_busy_as_the_ledger_says_now(ledger: Ledger, w1: str) -> None:
    first, second = running(ledger), running(ledger)
    put(ledger)
    claim_jobs(ledger)
    ledger.workers.beat(Heartbeat("w1", running=7, processed=0))
    [worker] = ledger.workers.list()
    assert (worker.busy, worker.held, worker.running) == (2, 3, 7)
    turn(ledger, done=[done(first)])
    assert ledger.workers.list()[0].busy == 1, "without another heartbeat"
    turn(ledger, done=[done(second)])
    assert views.worker_view(ledger.workers.list()[0])["running"] == 0
