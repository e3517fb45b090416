"""Clocks are set while workers run: the database server's, or that of a worker's host."""

from pathlib import Path

import pytest
from tests.support.fleet import (
    LEASE_S,
    PROMPT,
    TIMEOUT_S,
    Clock,
    Fleet,
    assert_one_attempt_each,
    begin,
    begin_on_each,
    needs_faketime,
    start_with_clock,
    the_dead,
)
from tests.support.hosts import Host, needs_other_hosts

pytestmark = [needs_faketime, needs_other_hosts]

HOUR_S = 3600.0
SEEN_FIRST = {**PROMPT, "heartbeat_interval": "1.2s", "check_interval": "0.1s"}
"""After a step somebody looks at the workers before their next heartbeat comes."""


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_the_servers_clock_steps_by_an_hour(tmp_path: Path, step_s: float) -> None:
    with start_with_clock() as (server, clock):
        fleet = Fleet(server.new_ledger(), tmp_path, **SEEN_FIRST)
        try:
            workers = [fleet.start("--concurrency", "1", place=Host(host=f"host-{n}")) for n in range(3)]
            # Their reapers have been awake for long enough to believe what they see.
            fleet.task("nap").enqueue(LEASE_S / 2 + 0.5).result(timeout=30)
            jobs, notes = begin_on_each(fleet, workers, "nap", LEASE_S + 1)
            clock.step_to(step_s)
            assert_one_attempt_each(fleet, jobs)
            assert notes.read_text().count("begun") == len(jobs)
            told = {finding.code.value: finding for finding in fleet.app.operator.doctor()}
            assert told["clock-step"].facts["step_s"] == pytest.approx(step_s, abs=10.0)
            # Forgiving the step must not hide a death. One worker freezes while the clock is set once more.
            for worker in workers:
                worker.stop()
            short = {"UNSTUCK_HEARTBEAT_TIMEOUT": f"{LEASE_S}s"}
            frozen = fleet.start("--concurrency", "1", place=Host(host="host-8"), **short)
            job, _ = begin(fleet, "nap_once_then_quick", 60.0, "twice")
            fleet.start("--concurrency", "1", place=Host(host="host-9"))
            frozen.freeze()
            clock.step_to(0)
            assert job.result(timeout=TIMEOUT_S) == "quick"
            assert len(the_dead(fleet)) == 1
        finally:
            fleet.close()


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_the_clock_of_a_workers_host_steps_by_an_hour(ready_pg_url: str, tmp_path: Path, step_s: float) -> None:
    clock = Clock(tmp_path / "clock")
    fleet = Fleet(ready_pg_url, tmp_path, **PROMPT)
    try:
        stepped = fleet.start("--concurrency", "1", place=Host(host="host-0"), **clock.environment)
        workers = [stepped, fleet.start("--concurrency", "1", place=Host(host="host-1"))]
        # time.sleep() fails under the library that sets the clock.
        jobs, _ = begin_on_each(fleet, workers, "nap_async", LEASE_S + 1)
        clock.step_to(step_s)
        assert_one_attempt_each(fleet, jobs)
    finally:
        fleet.close()
