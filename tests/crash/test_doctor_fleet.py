"""The doctor among real workers: there is nothing to say of a healthy fleet."""

from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet

from unstuck.client.doctor.codes import Severity
from unstuck.client.doctor.finding import Finding

HOST_S_OWN = frozenset({"oom-group"})
"""What the machine under test brings along, and no test can mend."""


def wrong(fleet: Fleet) -> dict[str, Finding]:
    findings = fleet.app.operator.doctor()
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
