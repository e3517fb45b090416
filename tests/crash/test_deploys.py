"""Old and new code run side by side."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fleet import ROOT, Fleet, wait_for

from unstuck import App
from unstuck.domain.states import JobState

NEW_CODE = """
from unstuck import App
app = App()

@app.task
def add(a, b):
    return a + b

@app.task
def brand_new():
    return "new"
"""


def test_a_worker_claims_only_what_its_app_knows(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "2")
    newer = App(fleet.url)

    @newer.task
    def brand_new() -> str:
        return "new"

    unknown = brand_new.enqueue()
    known = fleet.task("add").enqueue_many([(n, n) for n in range(20)])
    for job in known:
        job.result(timeout=30)
    assert unknown.state is JobState.PENDING
    assert "brand_new" in str(fleet.app.operator.explain_wait(unknown.id))
    (tmp_path / "newer_app.py").write_text(NEW_CODE)
    process = subprocess.Popen(
        [sys.executable, "-m", "unstuck.cli.main", "worker", "newer_app:app"],
        cwd=tmp_path,
        env={**os.environ, "UNSTUCK_URL": fleet.url, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert unknown.result(timeout=30) == "new"
        assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    finally:
        process.terminate()
        process.wait(20)
        newer.close()


def test_many_jobs_of_an_unknown_task_do_not_hide_the_known_ones(fleet: Fleet) -> None:
    newer = App(fleet.url)

    @newer.task
    def brand_new(n: int) -> int:
        return n

    brand_new.enqueue_many([(n,) for n in range(5_000)])
    newer.close()
    fleet.start("--concurrency", "4")
    jobs = fleet.task("add").enqueue_many([(n, n) for n in range(200)])
    wait_for(lambda: len(fleet.ledger.outcomes([job.id for job in jobs])) == len(jobs), "the known jobs to end")


def test_newer_code_asks_for_a_shorter_lease_than_the_old_worker_beats(fleet: Fleet) -> None:
    """The worker beats every 5 s for its own app; the job brought a timeout of 2 s: it must not lose it each time."""
    fleet.start("--concurrency", "1")
    newer = App(fleet.url)

    @newer.task(on_crash="retry", heartbeat_interval="0.5s", heartbeat_timeout="2s")
    def nap_again(seconds: float, path: str = "") -> str:
        return "rested"

    job = nap_again.enqueue(5.0)
    assert job.result(timeout=40) == "rested"
    assert len(fleet.ledger.attempts(job.id)) == 1
    newer.close()
