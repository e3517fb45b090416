"""The doctor among real workers: there is nothing to say of a healthy fleet, and a sick one is known at once."""

import os
import signal
import subprocess

from tests.crash.conftest import MakeFleet
from tests.support import processes
from tests.support.fleet import ROOT, Fleet, wait_for

from unstuck.client.doctor.facts import Thresholds
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.domain.states import JobState

HOST_S_OWN = frozenset({"oom-group"})
"""What the machine under test brings along, and no test can mend."""
VISIT_S = 0.3
"""A visit is more than a look: without a pause between them the doctor would keep the machine busy."""


def wrong(fleet: Fleet, limits: Thresholds | None = None) -> dict[str, Finding]:
    findings = fleet.app.operator.doctor(limits)
    return {
        finding.code.value: finding
        for finding in findings
        if finding.severity is not Severity.INFO and finding.code not in HOST_S_OWN
    }


def test_a_healthy_fleet_gives_no_problem_and_no_warning(make_fleet: MakeFleet) -> None:
    # Beats as in life; on a machine as busy as this one, a wider timeout leaves room for its slow moments.
    fleet = make_fleet(heartbeat_timeout="60s")
    workers = [fleet.start("--concurrency", "2") for _ in range(2)]
    jobs = [fleet.task("add").enqueue(n, n) for n in range(20)]
    assert [job.result(timeout=60) for job in jobs] == [2 * n for n in range(20)]
    assert wrong(fleet) == {}
    told = {finding.code.value: finding for finding in fleet.app.operator.doctor()}
    assert "containment" in told
    for worker in workers:
        record = worker.record()
        assert record is not None
        assert record.metadata["containment"]
        assert record.metadata["settings"]["heartbeat_timeout_s"] == 60.0
        assert record.metadata["reaper"] is True


def test_a_worker_that_beats_and_does_nothing_is_found_and_named(make_fleet: MakeFleet) -> None:
    # Its own watchdog ends it after two timeouts: long after the doctor has seen it.
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="60s", poll_interval="0.2s")
    stuck = fleet.start("--concurrency", "2", UNSTUCK_FAILPOINTS="ledger_thread.turn=hang:3")
    waits = fleet.task("add").enqueue_many([(n, n) for n in range(20)])[-1]
    finding = wait_for(lambda: wrong(fleet).get("idle-worker"), "the doctor to see it", every_s=VISIT_S)
    assert finding.severity is Severity.PROBLEM
    assert finding.facts["worker"] == stuck.id
    assert f"end process {stuck.pid}" in finding.cure
    assert "idle-worker" in {one.code for one in fleet.app.operator.doctor_job(waits.id)}
    record = stuck.record()
    assert record is not None
    assert record.silent_s < record.suspect_after_s, "it beats all the while: nobody else would notice"
    stuck.kill_family()
    fleet.start("--concurrency", "2")
    assert waits.result(timeout=60) == 38
    wait_for(lambda: wrong(fleet) == {}, "the doctor to be content", every_s=VISIT_S)


def test_a_stopped_worker_is_late_then_silent_and_nobody_sweeps(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="5s", check_interval="0.25s")
    worker = fleet.start("--concurrency", "1", "--no-reaper")
    job, _ = fleet.begin("nap", 600)
    worker.freeze()
    wait_for(lambda: "late-beats" in wrong(fleet), "a late beat", every_s=VISIT_S)
    silent = wait_for(lambda: wrong(fleet).get("silent-worker"), "a silent worker", every_s=VISIT_S)
    assert (silent.severity, silent.facts["worker"], silent.facts["held"]) == (Severity.PROBLEM, worker.id, 1)
    wait_for(lambda: "no-reaper" in wrong(fleet), "the doctor to miss the rounds of a reaper", every_s=VISIT_S)
    worker.kill_family()
    # Whoever comes and sweeps settles it.
    fleet.start("--concurrency", "1")
    fleet.wait_state(job, JobState.FAILED)
    wait_for(lambda: wrong(fleet) == {}, "the doctor to be content", every_s=VISIT_S)


def test_a_dead_worker_that_still_holds_jobs_since_its_burial_was_interrupted(fleet: Fleet) -> None:
    victim = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 600)
    victim.kill_family()
    interrupted = sweep_once(fleet, UNSTUCK_FAILPOINTS="reap.after_declare_dead=kill")
    assert interrupted.returncode == -signal.SIGKILL, interrupted.stderr
    soon = Thresholds(settling_s=0.1)
    finding = wait_for(
        lambda: wrong(fleet, soon).get("dead-worker-holds-jobs"), "the doctor to see what is left", every_s=VISIT_S
    )
    assert (finding.severity, finding.facts["worker"], finding.facts["held"]) == (Severity.PROBLEM, victim.id, 1)
    assert fleet.app.operator.doctor_job(job.id)[0].code == "dead-worker-holds-jobs"
    # The cure that it names.
    assert sweep_once(fleet).returncode == 0
    assert fleet.state(job) is JobState.FAILED
    assert wrong(fleet, soon) == {}


def sweep_once(fleet: Fleet, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, **environment}
    return processes.run("unstuck.cli.main", "reaper", "--once", "--url", fleet.url, cwd=ROOT, env=surroundings)
