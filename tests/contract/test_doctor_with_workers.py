"""Clocks that really differ, and bells that are really not heard: made with the means of the system."""

import glob
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.support.fleet import ROOT, Fleet, wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import reserve_port

from unstuck import config
from unstuck.client.doctor.diagnose import diagnose
from unstuck.client.doctor.facts import Thresholds
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.domain.states import JobState, WorkerState

FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")
needs_faketime = pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")


def other_time(off_s: int) -> dict[str, str]:
    """The environment of a process whose wall clock is off by so much; clocks that only measure go as always."""
    return {"LD_PRELOAD": FAKETIME, "FAKETIME": f"{off_s:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def other_host(name: str, command: list[str]) -> list[str]:
    """The command in a host of its own name: that is all that makes another host for a ledger."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]


@pytest.fixture(scope="module")
def renamed_hosts() -> None:
    if shutil.which("unshare") and shutil.which("hostname"):
        tried = subprocess.run(other_host("elsewhere", ["true"]), capture_output=True, check=False)
        if tried.returncode == 0:
            return
    pytest.skip("may not make a host of another name (unshare --uts)")


def doctor(url: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run `unstuck doctor --json`, and give its exit code and findings by code."""
    command = [sys.executable, "-m", "unstuck.cli.main", "doctor", "--json", "--url", url]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, {finding["code"]: finding for finding in json.loads(done.stdout)}


@pytest.fixture
def fleet(pg_url: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(pg_url, tmp_path, heartbeat_interval="0.5s", heartbeat_timeout="10s", check_interval="0.5s")
    fleet.app.migrate()
    yield fleet
    fleet.close()


@needs_faketime
@pytest.mark.parametrize("off_s", [90, -90])
def test_the_clock_of_this_host_is_off(fleet: Fleet, off_s: int) -> None:
    _, findings = doctor(fleet.url, **other_time(off_s))
    found = findings["clock-differs"]
    assert found["facts"]["off_s"] == pytest.approx(off_s, abs=5)
    assert ("ahead of" if off_s > 0 else "behind") in found["what"]
    _, findings = doctor(fleet.url)
    assert "clock-differs" not in findings


@needs_faketime
@pytest.mark.usefixtures("renamed_hosts")
def test_a_worker_on_a_host_with_a_wrong_clock_is_named_and_works_all_the_same(fleet: Fleet) -> None:
    log = (fleet.folder / "far-away.log").open("wb")
    command = [sys.executable, "-m", "unstuck.cli.main", "worker", "tests.crash.apps.tasks:app"]
    process = subprocess.Popen(
        other_host("far-away", command),
        cwd=ROOT,
        env={**fleet.surroundings(), **other_time(-300)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        [worker] = wait_for(fleet.ledger.workers.list, "the worker of the other host")
        assert worker.host == "far-away"
        _, findings = doctor(fleet.url)
        found = findings["clock-differs"]
        assert found["facts"]["host"] == "far-away"
        assert found["facts"]["off_s"] == pytest.approx(-300, abs=5)
        # Its clock is five minutes late, far more than any timeout: nobody's life depends on it.
        assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
        assert fleet.task("add").options(delay="1s").enqueue(2, 2).result(timeout=30) == 4
        nap, _ = fleet.begin("nap_async", 2.0)  # time.sleep() fails under that library
        assert nap.result(timeout=30) == "rested"
        [worker] = fleet.ledger.workers.list()
        assert worker.state is WorkerState.ACTIVE
        record = nap.record()
        assert abs((record.finished_at or 0) - time.time()) < 60, "times are the database's"
        assert fleet.state(nap) is JobState.SUCCEEDED
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def test_an_outcome_that_waits_behind_an_open_transaction_is_a_problem_with_a_name(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 0.5)
    limits = Thresholds(blocking_s=1.0)
    with psycopg.connect(fleet.url, application_name="shop") as user:
        user.execute("select 1 from unstuck.jobs where id = %s for update", (job.id,))

        def blocked() -> Finding | None:
            found = [one for one in fleet.app.operator.doctor(limits) if one.code == "blocking-transaction"]
            return found[0] if found else None

        finding = wait_for(blocked, "the transaction to be found")
        assert finding.severity is Severity.PROBLEM
        assert finding.facts["pid"] == user.info.backend_pid
        assert finding.facts["jobs"] == [job.id]
        assert f"It has locked job {job.id}, which a worker has in hand" in finding.why
    assert job.result(timeout=30) == "rested"
    assert not [one for one in fleet.app.operator.doctor(limits) if one.code == "blocking-transaction"]


class Swallows(Proxy):
    """A line on which everything passes but notifications: a pooler, or a proxy that knows too little."""

    def __init__(self, url: str) -> None:
        self.swallowed = 0
        super().__init__(url)

    def filter_answers(self) -> Callable[[bytes], bytes]:
        held = b""

        def changed(data: bytes) -> bytes:
            nonlocal held
            held += data
            passed = b""
            while len(held) >= 5 and len(held) >= (size := 1 + int.from_bytes(held[1:5], "big")):
                message, held = held[:size], held[size:]
                if message[:1] == b"A":
                    self.swallowed += 1
                else:
                    passed += message
            return passed

        return changed


def test_a_line_that_swallows_notifications_is_found_and_jobs_run_by_the_poll(fleet: Fleet) -> None:
    # In the clear: it must be able to read what passes.
    with Swallows(f"{fleet.url}?sslmode=disable&gssencmode=disable") as line:
        through = Fleet(line.url, fleet.folder, poll_interval="0.3s")
        try:
            worker = through.start("--concurrency", "1")
            _, findings = doctor(line.url)
            assert "notify-silent" in findings
            assert "set listen_url" in findings["notify-silent"]["cure"]
            assert line.swallowed, "there was something to hear"
            _, cured = doctor(line.url, UNSTUCK_LISTEN_URL=fleet.url)
            assert "notify-silent" not in cured
            # Rung in vain, and run by the poll.
            assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
            assert worker.process.poll() is None
        finally:
            through.close()


def test_a_listen_url_that_leads_nowhere(fleet: Fleet) -> None:
    with reserve_port() as reserved:  # Bound, so that no other process listens there.
        nowhere = f"postgresql://postgres@127.0.0.1:{reserved.getsockname()[1]}/jobs"
        findings = {one.code.value: one for one in diagnose(config.build({"url": fleet.url, "listen_url": nowhere}))}
        assert "notify-silent" in findings
        assert "refused" in findings["notify-silent"].why.lower()
        assert "listen_url" in findings["notify-silent"].cure
        # A worker that is told so works all the same.
        worker = fleet.start("--concurrency", "1", UNSTUCK_LISTEN_URL=nowhere, UNSTUCK_POLL_INTERVAL="0.3s")
        assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
        assert worker.process.poll() is None
