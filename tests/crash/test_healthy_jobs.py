"""What looks dead and is not: nobody may take a living job away."""

from pathlib import Path

from tests.crash.conftest import MakeFleet

TIGHT = {"heartbeat_interval": "0.4s", "heartbeat_timeout": "1s", "check_interval": "0.2s"}


def test_c_code_that_holds_the_gil_for_three_timeouts_costs_no_job(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**TIGHT)
    fleet.start("--concurrency", "2")
    fleet.start("--concurrency", "2")
    job = fleet.task("hold_the_gil").enqueue(3.0)
    assert job.result(timeout=30) == "held"
    assert len(fleet.ledger.attempts(job.id)) == 1


def test_a_healthy_job_of_ten_timeouts_runs_once(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**TIGHT)
    fleet.start("--concurrency", "2")
    fleet.start("--concurrency", "2")
    notes = tmp_path / "notes"
    jobs = [fleet.task("nap").enqueue(10.0, str(notes)), fleet.task("nap_again").enqueue(10.0, str(notes))]
    for job in jobs:
        assert job.result(timeout=60) == "rested"
        assert len(fleet.ledger.attempts(job.id)) == 1
    assert notes.read_text().count("begun") == 2
