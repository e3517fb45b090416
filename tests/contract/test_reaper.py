"""Rounds on a real ledger: who is declared dead, by whom, and what becomes of what they held."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.stored_workers import LONG_S, StoredWorkers, a_stage

from unstuck import failpoints, host
from unstuck.config import Recovery
from unstuck.domain.liveness import OVERDUE_LOST_GRACE_S, Detector
from unstuck.domain.policy import Policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.maintenance import service
from unstuck.maintenance.service import run_once
from unstuck.recovery import evidence, settle
from unstuck.runner.status_page import SYNC, StatusPage

SHORT_S = 0.2
RETRY = Policy(on_crash="retry")
QUICK = Recovery(heartbeat_interval=0.05, heartbeat_timeout=SHORT_S, check_interval=0.05)


@pytest.fixture(params=["sqlite", "postgresql"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredWorkers]:
    url = f"sqlite:///{tmp_path}/jobs.db" if request.param == "sqlite" else request.getfixturevalue("ready_pg_url")
    with a_stage(url) as made:
        yield made


def test_a_quiet_ledger_needs_nothing(stage: StoredWorkers) -> None:
    stage.worker(body=stage.body())
    done = stage.reaper(Recovery()).sweep()
    assert (done.skipped, done.watched, done.counts()) == ("", 1, {})


def test_one_sweep_per_interval_however_many_watchmen(stage: StoredWorkers) -> None:
    assert stage.reaper(Recovery()).sweep().skipped == ""
    assert stage.reaper(Recovery()).sweep().skipped == "ticket"
    assert stage.reaper(Recovery()).sweep(ticket=False).skipped == ""


def test_a_process_that_is_gone_is_seen_without_waiting_for_any_timeout(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    kept, [fails], [returns] = stage.claimed(worker, 2), stage.running(worker), stage.running(worker, policy=RETRY)
    body.kill()
    done = stage.reaper(Recovery()).sweep()
    assert done.deaths == {Detector.PEER: 1}
    assert (done.requeued, done.failed) == (3, 1)
    assert [stage.state(job) for job in [*kept, fails, returns]] == [
        JobState.PENDING,
        JobState.PENDING,
        JobState.FAILED,
        JobState.PENDING,
    ]
    assert stage.messages(kept[0])[-1] == f"Task re-queued due to stale worker: {worker}"
    assert stage.messages(returns)[-1].startswith(f"Task re-queued due to stale worker: {worker} (")
    assert stage.cause(fails) == f"worker {worker} on host {host.hostname()}: its process no longer exists (neighbour)"
    record = stage.record(worker)
    assert record.state is WorkerState.DEAD
    assert record.verdict is not None
    assert (record.verdict.detector, record.verdict.by) == (Detector.PEER, "test")


def test_the_log_says_it_in_the_words_people_search_for(stage: StoredWorkers, caplog: pytest.LogCaptureFixture) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    stage.claimed(worker, 2)
    stage.running(worker)
    body.kill()
    stage.reaper(Recovery()).sweep()
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert said[f"Dead worker detected: {worker}"] == "ERROR"
    assert said["Re-queued 2 stale tasks"] == "WARNING"
    assert said["Worker died unexpectedly"] == "ERROR"


def test_with_the_neighbours_blinded_a_dead_process_waits_for_its_lease(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body, suspect_after_s=SHORT_S)
    stage.running(worker)
    body.kill()
    blind = Recovery(heartbeat_interval=0.05, heartbeat_timeout=SHORT_S, evidence=("session",))
    stage.silent(worker, SHORT_S)
    assert stage.reaper(blind).sweep(ticket=False).deaths == {Detector.LEASE: 1}


def test_a_silent_worker_loses_everything_at_its_timeout(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [claimed], [running] = stage.claimed(worker), stage.running(worker)
    stage.silent(worker, SHORT_S)
    done = stage.reaper(QUICK).sweep()
    assert done.deaths == {Detector.LEASE: 1}
    assert stage.state(claimed) is JobState.PENDING
    assert stage.state(running) is JobState.FAILED
    assert "no heartbeat for" in stage.cause(running)
    assert stage.record(worker).held == 0


def test_a_patient_job_keeps_its_silent_worker_suspect_while_its_claims_go_back(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [claimed], [quick] = stage.claimed(worker), stage.running(worker)
    [patient] = stage.running(worker, policy=Policy(heartbeat_timeout_s=LONG_S))
    stage.silent(worker, SHORT_S)
    done = stage.reaper(QUICK).sweep()
    assert (done.suspected, done.deaths.total(), done.requeued, done.failed) == (1, 0, 1, 1)
    assert stage.record(worker).state is WorkerState.SUSPECT
    assert (stage.state(claimed), stage.state(quick)) == (JobState.PENDING, JobState.FAILED)
    assert stage.state(patient) is JobState.RUNNING
    answer = stage.ledger.workers.beat(Heartbeat(worker, running=1, processed=0))
    assert answer.was_suspect
    assert answer.state is WorkerState.ACTIVE


def test_a_job_that_asked_for_less_is_taken_before_its_worker_is_suspected_for_the_rest(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker()
    [claimed] = stage.claimed(worker)
    [hasty] = stage.running(worker, policy=Policy(heartbeat_timeout_s=SHORT_S, heartbeat_interval_s=0.05))
    stage.silent(worker, SHORT_S)
    done = stage.reaper(Recovery()).sweep()
    assert (done.suspected, done.failed, done.requeued) == (1, 1, 0)
    assert (stage.state(hasty), stage.state(claimed)) == (JobState.FAILED, JobState.CLAIMED)


def test_a_job_without_heartbeat_outlives_its_silent_worker_until_its_deadline(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [job] = stage.running(worker, policy=Policy(heartbeat=False, timeout_s=LONG_S))
    stage.silent(worker, SHORT_S)
    stage.reaper(QUICK).sweep()
    assert stage.record(worker).state is WorkerState.SUSPECT
    assert stage.state(job) is JobState.RUNNING


def test_a_worker_that_beats_in_between_keeps_its_jobs(stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [job] = stage.running(worker)
    stage.silent(worker, SHORT_S)
    seen = stage.ledger.recovery.watch()
    stage.ledger.workers.beat(Heartbeat(worker, running=1, processed=0))
    reaper = stage.reaper(QUICK)
    monkeypatch.setattr(stage.ledger.recovery, "watch", lambda host=None: seen)
    done = reaper.sweep()
    assert not done.deaths
    assert stage.state(job) is JobState.RUNNING


def test_switched_off_recovery_leaves_the_silent_to_an_operator_and_warns_once(
    stage: StoredWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [claimed], [running] = stage.claimed(worker), stage.running(worker)
    stage.silent(worker, SHORT_S)
    off = Recovery(
        heartbeat_interval=0.05,
        heartbeat_timeout=SHORT_S,
        auto_requeue_stale_claimed=False,
        auto_fail_stale_running=False,
    )
    reaper = stage.reaper(off)
    for _ in range(3):
        done = reaper.sweep(ticket=False)
        assert (done.left, done.settled, done.deaths.total()) == (2, 0, 0)
    assert (stage.state(claimed), stage.state(running)) == (JobState.CLAIMED, JobState.RUNNING)
    assert stage.record(worker).state is WorkerState.SUSPECT
    warnings = [record for record in caplog.records if "left for an operator" in record.getMessage()]
    assert len(warnings) == 1
    # It was only slow: with nothing taken from it, it goes on as if nothing had been.
    assert stage.ledger.workers.beat(Heartbeat(worker, running=1, processed=0)).state is WorkerState.ACTIVE


def test_half_switched_off_recovery_does_the_other_half(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    [claimed], [running] = stage.claimed(worker), stage.running(worker)
    stage.silent(worker, SHORT_S)
    half = Recovery(heartbeat_interval=0.05, heartbeat_timeout=SHORT_S, auto_fail_stale_running=False)
    done = stage.reaper(half).sweep()
    assert (done.requeued, done.left) == (1, 1)
    assert (stage.state(claimed), stage.state(running)) == (JobState.PENDING, JobState.RUNNING)


def test_switched_off_recovery_still_settles_what_the_kernel_saw(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    [job] = stage.running(worker)
    body.kill()
    off = Recovery(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    assert stage.reaper(off).sweep().failed == 1
    assert stage.state(job) is JobState.FAILED


def test_a_reaper_killed_after_the_verdict_leaves_the_rest_to_the_next_one(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    [job] = stage.running(worker)
    body.kill()
    reaper = stage.reaper(Recovery())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reaper._handover, "recover", killed)
    with pytest.raises(KeyboardInterrupt):
        reaper.sweep()
    assert stage.state(job) is JobState.RUNNING
    assert stage.reaper(Recovery()).sweep(ticket=False).failed == 1
    assert stage.cause(job).endswith("its process no longer exists (neighbour)")


def test_a_worker_that_stopped_without_giving_back_costs_no_crash(stage: StoredWorkers) -> None:
    worker = stage.worker()
    [job] = stage.running(worker, policy=RETRY)
    stage.ledger.workers.stop(worker)
    assert stage.reaper(Recovery()).sweep().requeued == 1
    record = stage.ledger.jobs.get(job)
    assert record is not None
    assert (record.state, record.crash_count) == (JobState.PENDING, 0)


def test_a_burial_takes_everything_in_batches(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    stage.claimed(worker, 600)
    stage.running(worker, 3)
    body.kill()
    done = stage.reaper(Recovery()).report_death(worker, Detector.PEER, "its process no longer exists")
    assert (done.requeued, done.failed) == (600, 3)
    assert stage.record(worker).held == 0
    assert done.queues == {"default"}


def test_burying_somebody_unknown_or_in_order_does_nothing(stage: StoredWorkers) -> None:
    worker = stage.worker(body=stage.body())
    stage.ledger.workers.stop(worker)
    for name in (worker, "nobody"):
        assert stage.reaper(Recovery()).report_death(name, Detector.SUPERVISOR, "exited").counts() == {}
    assert stage.record(worker).state is WorkerState.STOPPED


def test_jobs_whose_code_never_began_return_for_free_and_the_runners_are_gone(
    stage: StoredWorkers, tmp_path: Path
) -> None:
    body, fork_server, runner = stage.body(), stage.body(), stage.body()
    page = StatusPage.create(tmp_path / "trace", 2)
    page.set_fork_server(fork_server.pid, fork_server.started)
    for slot in range(2):
        page.set_kind(slot, SYNC)
    page.set_runner(0, runner.pid, runner.started)
    worker = stage.worker(body=body, status_page=str(page.path))
    [entered, waiting] = stage.running(worker, 2, policy=RETRY)
    tokens = {held.job_id: held.token for held in stage.ledger.workers.held(worker)}
    page.enter(0, tokens[entered])
    body.kill()
    done = stage.reaper(Recovery()).sweep()
    assert done.requeued == 2
    assert runner.dead
    assert fork_server.dead
    spent = {job: stage.ledger.jobs.get(job) for job in (entered, waiting)}
    assert {job: record.crash_count for job, record in spent.items() if record} == {entered: 1, waiting: 0}
    assert not page.path.exists()


def test_a_job_past_its_hard_deadline_is_ended_when_its_worker_does_not(stage: StoredWorkers) -> None:
    stage.worker()
    worker = stage.worker(suspect_after_s=SHORT_S)
    policy = Policy(heartbeat=False, timeout_s=0.05, retry=RetryRule(max_attempts=1))
    [job] = stage.running(worker, policy=policy)
    stage.silent(worker, SHORT_S)
    reaper = stage.reaper(QUICK)
    reaper.sweep()
    assert stage.record(worker).state is WorkerState.SUSPECT
    for _ in range(200):
        if reaper.sweep(ticket=False).failed:
            break
        stage.silent(worker, stage.watch(worker).silent_s + 0.05)
    record = stage.ledger.jobs.get(job)
    assert record is not None
    assert record.error is not None
    assert record.error.code == "DEADLINE_EXCEEDED"


def test_a_late_reaper_believes_the_kernel_and_nobody_else(stage: StoredWorkers) -> None:
    stage.worker()
    body = stage.body()
    gone, silent = stage.worker(body=body), stage.worker(suspect_after_s=SHORT_S)
    body.kill()
    stage.silent(silent, SHORT_S)
    reaper = stage.reaper(QUICK)
    long_ago_s = host.boottime_s() - 60.0
    reaper.watch.reached(long_ago_s, long_ago_s, stale_s=0.0, connected_s=0.0)
    done = reaper.sweep()
    assert done.skipped == "late"
    assert done.deaths == {Detector.PEER: 1}
    assert stage.record(gone).state is WorkerState.DEAD
    assert stage.record(silent).state is WorkerState.ACTIVE


def test_one_round_for_cron_looks_twice_if_no_one_kept_watch(stage: StoredWorkers) -> None:
    worker = stage.worker(suspect_after_s=SHORT_S)
    stage.unwatched(worker, SHORT_S)
    looked: list[float] = []

    def road_is_open_again(wait_s: float) -> None:
        looked.append(wait_s)
        stage.ledger.workers.beat(Heartbeat(worker, running=0, processed=0))

    assert run_once(stage.ledger, QUICK, pause=road_is_open_again).skipped == ""
    assert looked == [SHORT_S]
    seen = stage.record(worker)
    assert seen.state is WorkerState.ACTIVE or seen.silent_s >= SHORT_S


def test_one_round_for_cron_believes_what_it_saw_twice(stage: StoredWorkers) -> None:
    worker = stage.worker(suspect_after_s=SHORT_S)
    stage.unwatched(worker, SHORT_S)
    assert run_once(stage.ledger, QUICK, pause=lambda _: None).deaths == {Detector.LEASE: 1}
    assert stage.record(worker).state is WorkerState.DEAD


def test_a_reaper_that_is_late_in_every_round_still_finds_a_long_silence(stage: StoredWorkers) -> None:
    silent = stage.worker(suspect_after_s=SHORT_S)
    [job] = stage.running(silent, policy=Policy(timeout_s=0.01, heartbeat=False))
    reaper = stage.reaper(QUICK)

    def late_round() -> bool:
        stage.keep_watch()
        long_ago_s = host.boottime_s() - 60.0
        reaper.watch.reached(long_ago_s, long_ago_s, stale_s=0.0, connected_s=0.0)
        assert reaper.sweep(ticket=False).skipped == "late"
        return stage.record(silent).state is WorkerState.DEAD

    wait_for(late_round, "the death")
    assert stage.state(job) is JobState.FAILED


def _rounds_for_cron(stage: StoredWorkers, worker: str, job: int, silences_s: Sequence[float]) -> None:
    """Do a round after each silence, and expect the job to end with one of them."""
    for silent_s in silences_s:
        stage.unwatched(worker, silent_s)
        run_once(stage.ledger, QUICK, pause=lambda _: None)
        if stage.state(job) is JobState.FAILED:
            return
    pytest.fail("The job is still held.")


def test_rounds_for_cron_alone_find_a_death_that_a_patient_job_waits_for(stage: StoredWorkers) -> None:
    worker = stage.worker(suspect_after_s=SHORT_S)
    [job] = stage.running(worker, policy=Policy(heartbeat_timeout_s=5 * SHORT_S))
    _rounds_for_cron(stage, worker, job, (SHORT_S, 6 * SHORT_S, 12 * SHORT_S))
    assert stage.record(worker).state is WorkerState.DEAD


def test_rounds_for_cron_alone_end_what_is_past_its_deadline_and_sends_no_heartbeat(stage: StoredWorkers) -> None:
    worker = stage.worker(suspect_after_s=SHORT_S)
    [job] = stage.running(worker, policy=Policy(heartbeat=False, timeout_s=SHORT_S))
    past_s = OVERDUE_LOST_GRACE_S + 2 * SHORT_S
    _rounds_for_cron(stage, worker, job, (SHORT_S, past_s, 2 * past_s))


def test_one_round_for_cron_waits_for_the_next_heartbeat_however_rare_they_are(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage.worker(suspect_after_s=SHORT_S, heartbeat_interval_s=120.0)
    monkeypatch.setattr(evidence, "patience_s", lambda _: SHORT_S)
    monkeypatch.setattr(service, "patience_s", lambda _: LONG_S)
    stage.unwatched(worker, SHORT_S)
    looked: list[float] = []
    run_once(stage.ledger, QUICK, pause=looked.append)
    assert looked == [182.0]


def test_a_machine_that_was_restarted_is_a_verdict_on_a_file_and_nothing_on_a_server(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage.worker(host=host.hostname(), boot_id="another-boot")
    # As if this machine had been started only now.
    monkeypatch.setattr(evidence, "BOOT_SLACK_S", -host.boottime_s() - 1.0)
    on_file = stage.ledger.single_host
    done = stage.reaper(Recovery()).sweep()
    assert done.deaths == ({Detector.BOOT: 1} if on_file else {})
    assert stage.record(worker).state is (WorkerState.DEAD if on_file else WorkerState.ACTIVE)


def test_a_container_with_a_boot_id_of_its_own_is_not_taken_for_a_machine_that_was_restarted(
    stage: StoredWorkers,
) -> None:
    worker = stage.worker(host=host.hostname(), boot_id="another-boot")
    assert stage.reaper(Recovery()).sweep().deaths == {}
    assert stage.record(worker).state is WorkerState.ACTIVE


def test_a_container_outlives_a_clock_that_is_set_forward_by_more_than_the_machine_has_run(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage.worker(host="another-container", boot_id="another-boot")
    # As if its last heartbeat were older than the machine.
    monkeypatch.setattr(evidence, "BOOT_SLACK_S", -host.boottime_s() - 1.0)
    assert stage.reaper(Recovery()).sweep().deaths == {}
    assert stage.record(worker).state is WorkerState.ACTIVE


def test_two_reapers_at_once_settle_each_job_once(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    jobs = stage.running(worker, 20, policy=RETRY)
    body.kill()
    reapers = [stage.reaper(Recovery()), stage.reaper(Recovery())]
    done = [reaper.report_death(worker, Detector.PEER, "its process no longer exists") for reaper in reapers]
    assert sum(round.requeued for round in done) == len(jobs)
    for job in jobs:
        record = stage.ledger.jobs.get(job)
        assert record is not None
        # Twenty died together and nobody knows of whom: once each, and as no crash.
        assert (record.crash_count, record.suspected_crashes, record.run_alone) == (0, 1, False)


def test_whoever_is_left_of_a_half_settled_crowd_is_no_culprit(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    jobs = stage.running(worker, 3, RETRY)
    body.kill()
    monkeypatch.setattr(settle, "SETTLE_BATCH", 2)
    failpoints.arm("reap.after_settle=raise")
    try:
        with pytest.raises(failpoints.FailpointHit):
            stage.reaper(Recovery()).sweep()
    finally:
        failpoints.arm("")
    assert len(stage.ledger.workers.held(worker)) == 1
    assert stage.reaper(Recovery()).sweep(ticket=False).requeued == 1
    records = [stage.ledger.jobs.get(job) for job in jobs]
    assert [(job.crash_count, job.suspected_crashes) for job in records if job is not None] == [(0, 1)] * 3


def test_a_crowd_that_fills_more_than_one_batch_is_judged_as_one(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first batch only one job ran: the others of the same process come later."""
    body = stage.body()
    worker = stage.worker(body=body)
    [first] = stage.running(worker, 1, RETRY)
    kept = stage.claimed(worker, 2)
    later = stage.running(worker, 2, RETRY)
    body.kill()
    monkeypatch.setattr(settle, "HELD_BATCH", 3)
    assert stage.reaper(Recovery()).sweep().requeued == 5
    records = [stage.ledger.jobs.get(job) for job in [first, *kept, *later]]
    assert [job.crash_count for job in records if job is not None] == [0] * 5
