"""What the doctor says of jobs that wait, on facts alone."""

import pytest
from tests.unit.doctor_kit import NOW_AT, facts, found, ready, told, worker

from unstuck.client.doctor.codes import Code, Severity
from unstuck.client.doctor.examining import examine
from unstuck.client.doctor.finding import MAX_ALIKE
from unstuck.domain.health import Disabled
from unstuck.store.diagnosis import COUNT_LIMIT, JobGroup, QueueLook, TaskLook
from unstuck.store.records import WorkerRecord

GROUP = JobGroup("default", "add", 3, 17, 90_000.0)


class TestWaiting:
    def test_nobody_serves_the_queue(self) -> None:
        finding = found(facts(queues=(ready("mail", number=12),)))["no-worker-for-queue"]
        assert finding.severity is Severity.PROBLEM
        assert finding.what == "12 ready jobs wait in queue 'mail'"
        assert "job 17" in finding.why
        assert "unstuck worker module:app --queues mail" in finding.cure
        assert finding.facts["example"] == 17

    def test_a_silent_worker_serves_nobody(self) -> None:
        assert "no-worker-for-queue" in found(facts(worker(silent_s=31.0), queues=(ready(),)))

    def test_a_count_that_was_broken_off_says_so(self) -> None:
        finding = found(facts(queues=(ready("mail", number=COUNT_LIMIT),)))["no-worker-for-queue"]
        assert finding.what.startswith("10,000 or more ready jobs")

    def test_nobody_knows_the_task_while_others_of_the_queue_go_on(self) -> None:
        queue = QueueLook("default", False, 5_000, (TaskLook("add", 900, 1, 2.0), TaskLook("resize", 4, 18, 60.0)))
        finding = found(facts(queues=(queue,)))["task-unknown"]
        assert finding.what == "At least 4 ready jobs wait for task 'resize' in queue 'default'"
        assert (finding.severity, finding.facts["example"]) == (Severity.PROBLEM, 18)

    def test_whoever_could_take_it_is_leaving(self) -> None:
        finding = found(facts(worker(request="drain"), queues=(ready(),)))["workers-leaving"]
        assert finding.severity is Severity.WARNING

    def test_a_paused_queue_is_a_warning_only_while_somebody_waits(self) -> None:
        finding = found(facts(queues=(ready(paused=True),)))["queue-paused"]
        assert finding.cure == "`unstuck resume default` lets it go on."
        idle = facts(queues=(QueueLook("default", True, 0),))
        assert found(idle) == {}
        assert "queue-paused" in told(idle)

    def test_far_off_is_information(self) -> None:
        assert found(facts(scheduled=(GROUP,))) == {}
        assert "scheduled-far-off" in told(facts(scheduled=(GROUP,)))

    def test_scheduled_where_nobody_serves_is_a_warning_when_it_is_near(self) -> None:
        near, far = JobGroup("mail", "add", 2, 17, 600.0), JobGroup("mail", "send", 1, 18, 90_000.0)
        finding = found(facts(coming=(near,), scheduled=(far,)))["scheduled-unserved"]
        assert finding.what == "3 jobs in queue 'mail' are scheduled, and as it is now nobody would take them"
        assert finding.why.endswith("The first is due in 10m: job 17 (add).")
        assert (finding.severity, finding.facts["reason"]) == (Severity.WARNING, "no-worker-for-queue")
        assert found(facts(scheduled=(far,), coming=(far,))) == {}
        assert "scheduled-unserved" in told(facts(scheduled=(far,), coming=(far,)))

    @pytest.mark.parametrize(
        ("served", "reason"),
        [
            (worker(tasks=("send",)), "task-unknown"),
            (worker(request="drain"), "workers-leaving"),
            (worker(disabled=Disabled("broken disk", "ada", NOW_AT)), "workers-disabled"),
        ],
        ids=["unknown", "leaving", "disabled"],
    )
    def test_scheduled_where_nobody_would_take_it(self, served: WorkerRecord, reason: str) -> None:
        group = JobGroup("default", "add", 1, 17, 60.0)
        assert found(facts(served, coming=(group,)))["scheduled-unserved"].facts["reason"] == reason

    def test_what_is_said_of_ready_jobs_is_not_said_again_of_the_scheduled(self) -> None:
        group = JobGroup("mail", "add", 1, 17, 60.0)
        assert set(found(facts(queues=(ready("mail"),), coming=(group,)))) == {"no-worker-for-queue"}
        paused = facts(queues=(QueueLook("mail", True, 0),), coming=(group,))
        assert found(paused) == {}
        assert found(facts(coming=(JobGroup("default", "add", 1, 17, 60.0),))) == {}

    def test_due_and_forgotten_is_a_problem(self) -> None:
        assert found(facts(overdue=(GROUP,)))["due-but-waiting"].severity is Severity.PROBLEM

    def test_the_quarantined_wait_for_somebody(self) -> None:
        finding = found(facts(quarantined=(GROUP,)))["quarantined"]
        assert finding.severity is Severity.WARNING
        assert "`unstuck quarantine release 17`" in finding.cure

    def test_two_hundred_deserted_queues_do_not_bury_the_rest(self) -> None:
        findings = examine(facts(queues=tuple(ready(f"q{n}") for n in range(200))))
        alike = [finding for finding in findings if finding.code is Code.NO_WORKER_FOR_QUEUE]
        assert len(alike) == MAX_ALIKE + 1
        assert alike[-1].what == "180 more like these"
