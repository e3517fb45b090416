"""Everything the doctor knows, made on purpose on a real ledger: it is found, and when it is mended it is gone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor, PostgresBackdoor
from tests.support.builders import (
    birth,
    claim_jobs,
    crash,
    crash_retry,
    done,
    new_job,
    put,
    running,
    start,
    turn,
    verdict,
)
from tests.support.doctor import CALM
from tests.support.fleet import wait_for

from unstuck import config
from unstuck.client.doctor.diagnose import diagnose
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Thresholds, gather
from unstuck.client.doctor.findings import Finding
from unstuck.client.operator import Operator
from unstuck.domain.conditions import Code, Severity
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.migrate import Migration
from unstuck.ledger.postgres import migrate as migrating_on_postgres
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.sqlite import migrate as migrating_on_sqlite

Look = Callable[..., dict[str, Finding]]


@pytest.fixture
def look(ledger: Ledger, url: str) -> Look:
    """Ask the doctor, and give what is more than information, by code."""

    def ask(
        limits: Thresholds | None = None, severities: tuple[str, ...] = ("problem", "warning"), **settings: Any
    ) -> Any:
        findings = examine(gather(ledger, config.build({"url": url, **settings}), limits), limits)
        return {finding.code.value: finding for finding in findings if finding.severity in severities}

    return ask


@pytest.fixture
def calm(ledger: Ledger) -> str:
    """A worker that was just born, and beats rarely enough to be well for the whole test."""
    ledger.workers.register(birth("w1", **CALM))
    return "w1"


class Watched:
    """A ledger that counts how often its workers are looked at."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.looks_at_workers = 0

    @property
    def workers(self) -> "Watched":
        return self

    def list(self, living_only: bool = False) -> Any:
        self.looks_at_workers += 1
        return self._ledger.workers.list(living_only)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger if hasattr(Ledger, name) else self._ledger.workers, name)


def test_an_empty_ledger_and_a_fresh_worker_are_healthy(ledger: Ledger, look: Look) -> None:
    assert look() == {}
    ledger.workers.register(birth("w1", **CALM))
    assert look() == {}


class TestJobsThatWait:
    def test_nobody_serves_their_queue(self, ledger: Ledger, look: Look) -> None:
        first = put(ledger, queue="mail")
        put(ledger, queue="mail", priority=-5)
        finding = look()["no-worker-for-queue"]
        assert finding.facts | {"waited_s": 0} == {"queue": "mail", "ready": 2, "example": first, "waited_s": 0}
        ledger.workers.register(birth("w1", queues=("mail",), **CALM))
        assert look() == {}

    def test_nobody_knows_their_task(self, ledger: Ledger, look: Look, calm: str) -> None:
        put(ledger)
        unknown = put(ledger, task="resize")
        assert look()["task-unknown"].facts["example"] == unknown
        ledger.workers.register(birth("w2", tasks=(TaskRecord("resize", "default"),), **CALM))
        assert look() == {}

    def test_their_queue_is_paused(self, ledger: Ledger, look: Look, calm: str) -> None:
        ledger.queues.pause("default", "ada")
        assert look() == {}
        assert "queue-paused" in look(severities=("info",))
        put(ledger)
        assert set(look()) == {"queue-paused"}
        ledger.queues.resume("default", "ada")
        assert look() == {}

    def test_everybody_is_leaving(self, ledger: Ledger, look: Look, calm: str) -> None:
        put(ledger)
        ledger.workers.request("w1", "drain", "ada")
        assert set(look()) == {"workers-leaving"}

    def test_they_are_scheduled_far_off(self, ledger: Ledger, look: Look, calm: str) -> None:
        put(ledger, delay_s=60.0)
        job_id = put(ledger, delay_s=3 * 86_400.0)
        assert look() == {}
        facts = look(severities=("info",))["scheduled-far-off"].facts
        assert (facts["count"], facts["example"]) == (1, job_id)
        assert facts["by_s"] == pytest.approx(3 * 86_400, abs=60)

    def test_they_are_scheduled_where_nobody_serves(self, ledger: Ledger, look: Look) -> None:
        put(ledger, queue="mail", delay_s=900.0)
        first = put(ledger, queue="mail", delay_s=600.0)
        put(ledger, queue="night", delay_s=8 * 3600.0)
        finding = look()["scheduled-unserved"]
        assert (finding.severity, finding.facts["queue"]) == (Severity.WARNING, "mail")
        assert (finding.facts["count"], finding.facts["example"]) == (2, first)
        assert finding.facts["by_s"] == pytest.approx(600, abs=60)
        assert look(severities=("info",))["scheduled-unserved"].facts["queue"] == "night"
        ledger.workers.register(birth("w1", queues=("mail", "night"), **CALM))
        assert look() == {}
        assert "scheduled-unserved" not in look(severities=("info",))

    def test_they_were_due_and_forgotten(self, ledger: Ledger, look: Look, calm: str, meddler: Backdoor) -> None:
        job_id = put(ledger, delay_s=5.0)
        assert look() == {}
        meddler.age_job(job_id, 65.0)
        assert look()["due-but-waiting"].facts["example"] == job_id
        ledger.maintenance.promote_due(10)
        assert ledger.diagnose(far_s=60.0, late_s=30.0).overdue == ()

    def test_they_are_quarantined(self, ledger: Ledger, look: Look, calm: str) -> None:
        job = running(ledger)
        error = JobError("CRASHED_TOO_OFTEN", "It killed 4 runners", "SIGSEGV", {})
        turn(ledger, endings=[Ending(job.job_id, job.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error)])
        assert look()["quarantined"].facts["example"] == job.job_id
        ledger.jobs.retry([job.job_id], "ada")
        assert "quarantined" not in look()

    def test_the_looks_are_bounded_however_many_wait(self, ledger: Ledger, look: Look) -> None:
        ledger.jobs.enqueue([new_job(task="add")] * 1_500 + [new_job(task="resize", priority=-1)] * 3)
        found = ledger.diagnose(far_s=1.0, late_s=1.0).queues
        assert [(queue.name, queue.ready) for queue in found] == [("default", 1_503)]
        counted = {task.task: task.count for task in found[0].tasks}
        assert counted == {"add": 997, "resize": 3}


class TestRecovery:
    def test_nobody_sweeps(self, ledger: Ledger, look: Look, calm: str, meddler: Backdoor) -> None:
        meddler.age_worker("w1", 3600.0)
        assert set(look()) == {"no-reaper"}
        assert ledger.maintenance.take_ticket("sweep", 60.0)
        assert look() == {}
        meddler.expire_ticket("sweep")
        assert set(look()) == {"no-reaper"}

    def test_recovery_is_switched_off(self, look: Look, calm: str) -> None:
        off = look(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
        assert set(off) == {"requeue-switched-off", "fail-switched-off"}

    def test_settings_here_decide_nothing_for_workers_that_stored_their_rules(self, ledger: Ledger, look: Look) -> None:
        ledger.workers.register(birth("w1", rules=RecoveryRules(), **CALM))
        assert look(auto_requeue_stale_claimed=False, auto_fail_stale_running=False) == {}
        ledger.workers.register(birth("w2", **CALM))
        assert set(look(auto_fail_stale_running=False)) == {"fail-switched-off"}

    def test_recovery_is_switched_off_in_a_worker(self, ledger: Ledger, look: Look) -> None:
        ledger.workers.register(birth("w1", rules=RecoveryRules(auto_fail_stale_running=False), **CALM))
        assert set(look()) == {"fail-switched-off"}


class TestWorkers:
    def test_alive_but_doing_nothing(self, ledger: Ledger, look: Look, meddler: Backdoor, beating: Any) -> None:
        ledger.workers.register(birth("w1", heartbeat_interval_s=0.1, suspect_after_s=30.0, running_stale_after_s=30.0))
        job_id = put(ledger)
        assert "idle-worker" not in look(poll_interval=0.1)
        meddler.age_job(job_id, 30.0)
        with beating(lambda: Heartbeat("w1", 0, 7)):
            finding = look(poll_interval=0.1)["idle-worker"]
            assert finding.facts["ready"] == [job_id]
            assert finding.severity is Severity.PROBLEM
        counter = iter(range(10**9))
        with beating(lambda: Heartbeat("w1", 0, next(counter))):
            # It ends one job after the other: it is behind, not idle.
            assert "idle-worker" not in look(poll_interval=0.1)
        [taken] = claim_jobs(ledger)
        assert "idle-worker" not in look(poll_interval=0.1)
        wait_for(lambda: ledger.recovery.held_jobs("w1", 1)[0].held_s > 0.1, "a beat that could tell of it")
        with beating(lambda: Heartbeat("w1", 1, 7)):
            # All that it holds is in a runner.
            assert "idle-worker" not in look(poll_interval=0.1)
        with beating(lambda: Heartbeat("w1", 0, 7)):
            finding = look(poll_interval=0.1)["idle-worker"]
            assert (finding.facts["held"], finding.facts["ready"]) == (1, [])
        start(ledger, [taken])
        turn(ledger, done=[done(taken)])
        with beating(lambda: Heartbeat("w1", 0, 8)):
            assert "idle-worker" not in look(poll_interval=0.1)

    def test_a_worker_that_beats_rarely_is_judged_without_waiting_for_it(
        self, ledger: Ledger, look: Look, meddler: Backdoor
    ) -> None:
        ledger.workers.register(
            birth("w1", heartbeat_interval_s=30.0, suspect_after_s=300.0, running_stale_after_s=300.0)
        )
        job_id = put(ledger)
        meddler.age_job(job_id, 20.0)
        # It may come for it yet, as soon as it beats.
        assert "idle-worker" not in look(poll_interval=0.1)
        meddler.age_job(job_id, 20.0)
        watched = Watched(ledger)
        found = examine(gather(watched, config.build({"url": "sqlite:///unused", "poll_interval": 0.1})))  # type: ignore[arg-type]
        assert [one.facts["ready"] for one in found if one.code is Code.IDLE_WORKER] == [[job_id]]
        assert watched.looks_at_workers < 10

    def test_the_doctor_of_one_job_waits_for_no_worker_of_another_queue(
        self, ledger: Ledger, meddler: Backdoor
    ) -> None:
        frequent = {"heartbeat_interval_s": 5.0, "suspect_after_s": 300.0, "running_stale_after_s": 300.0}
        ledger.workers.register(birth("w1", queues=("other",), **frequent))
        meddler.age_job(put(ledger, queue="other"), 60.0)
        waits = put(ledger)
        watched = Watched(ledger)
        settings = config.build({"url": "sqlite:///unused", "poll_interval": 0.1})
        findings = Operator(watched, settings).doctor_job(waits)  # type: ignore[arg-type]
        assert findings[0].code is Code.NO_WORKER_FOR_QUEUE
        assert watched.looks_at_workers < 10

    @pytest.fixture
    def beating(self, open_again: OpenLedger) -> Any:
        @contextmanager
        def beat(pulse: Callable[[], Heartbeat]) -> Iterator[None]:
            over = threading.Event()
            other = open_again()

            def go_on() -> None:
                while not over.wait(0.02):
                    other.workers.beat(pulse())

            other.workers.beat(pulse())
            thread = threading.Thread(target=go_on)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

        return beat

    def test_beats_that_come_late(self, ledger: Ledger, look: Look) -> None:
        ledger.workers.register(birth("w1", heartbeat_interval_s=0.2, suspect_after_s=60.0, running_stale_after_s=60.0))
        wait_for(lambda: "late-beats" in look(), "a late beat")

    def test_a_silent_worker_that_holds_jobs(self, ledger: Ledger, look: Look) -> None:
        ledger.workers.register(birth("w1", heartbeat_interval_s=0.1, suspect_after_s=0.3, running_stale_after_s=0.3))
        running(ledger)
        finding = wait_for(lambda: look().get("silent-worker"), "a silent worker")
        assert (finding.severity, finding.facts["held"]) == (Severity.PROBLEM, 1)

    def test_the_dead_that_still_hold_jobs(self, ledger: Ledger, look: Look, calm: str, meddler: Backdoor) -> None:
        ledger.workers.register(birth("w2", **CALM))
        job = running(ledger, "w2")
        assert ledger.recovery.declare_dead("w2", verdict(), GuardNone())
        assert "dead-worker-holds-jobs" not in look()
        meddler.age_worker("w2", 60.0)
        assert look()["dead-worker-holds-jobs"].facts["worker"] == "w2"
        ledger.recovery.settle("w2", [crash(job)], [], GuardNone())
        assert "dead-worker-holds-jobs" not in look()


class TestSettings:
    def test_a_timeout_without_room(self, ledger: Ledger, look: Look) -> None:
        ledger.workers.register(
            birth("w1", heartbeat_interval_s=20.0, suspect_after_s=40.0, running_stale_after_s=40.0)
        )
        assert set(look()) == {"timeout-too-tight"}

    def test_an_interval_of_half_the_timeout_in_the_settings(self, look: Look, calm: str) -> None:
        finding = look(heartbeat_interval="5s", claimed_stale_after="10s")["timeout-too-tight"]
        assert finding.facts["timeout"] == "claimed_stale_after"
        assert (finding.facts["heartbeat_interval_s"], finding.facts["timeout_s"]) == (5.0, 10.0)
        assert "heartbeat_interval to 3.33s" in finding.cure
        assert look(heartbeat_interval="3s", claimed_stale_after="10s") == {}

    def test_an_interval_of_half_the_timeout_of_one_task(self, ledger: Ledger, look: Look) -> None:
        policy = encode_policy(Policy(heartbeat_timeout_s=10.0))
        ledger.workers.register(birth("w1", tasks=(TaskRecord("resize", "default", policy),), **CALM))
        finding = look()["timeout-too-tight"]
        assert finding.facts["task"] == "resize"
        assert finding.facts["workers"] == ["w1"]

    def test_rounds_rarer_than_the_timeout(self, look: Look, calm: str) -> None:
        assert set(look(check_interval="60s")) == {"check-interval-too-long"}

    def test_workers_that_differ(self, ledger: Ledger, look: Look, calm: str) -> None:
        ledger.workers.register(birth("w2", **{**CALM, "suspect_after_s": 60.0}, version="2.0"))
        assert set(look()) == {"settings-differ", "versions-differ"}


class TestTheLedger:
    def test_there_are_no_tables(self, empty_ledger: Ledger, url: str) -> None:
        assert diagnose(config.build({"url": url}))[0].code == "no-ledger"
        with pytest.raises(Exception, match="unstuck migrate"):
            empty_ledger.check_schema()

    def test_the_tables_are_newer(self, open_again: OpenLedger, url: str, meddler: Backdoor) -> None:
        open_again().migrate()
        meddler.age_schema(9_999)
        assert diagnose(config.build({"url": url}))[0].code == "schema-ahead"

    def test_the_tables_are_older(
        self, open_again: OpenLedger, url: str, meddler: Backdoor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        open_again().migrate()
        dialect = migrating_on_sqlite if meddler.dialect == "sqlite" else migrating_on_postgres
        number = len(dialect.MIGRATIONS) + 1
        monkeypatch.setattr(dialect, "MIGRATIONS", (*dialect.MIGRATIONS, Migration(number, f"{number:04}_next", "")))
        finding = diagnose(config.build({"url": url}))[0]
        assert finding.code == "schema-behind"
        assert f"{number:04}_next not applied" in f"{finding}"

    def test_the_functions_are_older(self, pg_ledger: PostgresLedger, pg_url: str) -> None:
        PostgresBackdoor(pg_url).rows("update functions set digest = 'another' where name = 'turn_v1'")
        finding = diagnose(config.build({"url": pg_url}))[0]
        assert finding.code == "schema-behind"
        assert "turn_v1" in f"{finding}"

    def test_the_tables_were_made_by_another_draft_of_a_migration(
        self, open_again: OpenLedger, url: str, meddler: Backdoor
    ) -> None:
        open_again().migrate()
        table = "unstuck_migrations" if meddler.dialect == "sqlite" else "migrations"
        meddler.rows(f"update {table} set digest = 'another' where number = 1")
        assert diagnose(config.build({"url": url}))[0].code == "schema-forked"

    @pytest.mark.parametrize("address", ["postgresql://u:secret@127.0.0.1:1/x", "sqlite:////nowhere/at/all.db"])
    def test_nobody_answers(self, address: str) -> None:
        finding = diagnose(config.build({"url": address}))[0]
        assert (finding.code, finding.severity) == ("ledger-unreachable", Severity.PROBLEM)
        assert "secret" not in f"{finding}"


class TestOneJob:
    @pytest.fixture
    def ask(self, ledger: Ledger, url: str) -> Callable[[int], list[Finding]]:
        return Operator(ledger, config.build({"url": url})).doctor_job

    def test_why_it_waits(self, ledger: Ledger, ask: Callable[[int], list[Finding]]) -> None:
        [finding] = ask(put(ledger))
        assert (finding.code, finding.severity) == ("no-worker-for-queue", Severity.PROBLEM)
        [later] = ask(put(ledger, delay_s=60.0))
        assert (later.code, later.severity) == ("scheduled", Severity.WARNING)
        ledger.workers.register(birth("w1", **CALM))
        assert [one.code for one in ask(put(ledger, delay_s=60.0))] == ["scheduled"]
        [ready] = ask(put(ledger))
        assert (ready.code, ready.severity) == ("queueing", Severity.INFO)

    def test_that_it_waits_for_its_turn_alone(self, ledger: Ledger, ask: Callable[[int], list[Finding]]) -> None:
        ledger.workers.register(birth("w1", **CALM))
        job = running(ledger)
        turn(ledger, endings=[crash_retry(job, counter="suspicion")])
        [suspect] = ask(job.job_id)
        assert (suspect.code, suspect.facts["alone"]) == ("queueing", True)
        assert suspect.why.endswith("It will run alone in its process: it is suspected of having killed one.")
        start(ledger, claim_jobs(ledger))
        [runs] = ask(job.job_id)
        assert runs.code == "running"
        assert runs.why.endswith("It runs alone in its process: it is suspected of having killed one.")
        [other] = ask(put(ledger))
        assert "alone" not in other.why

    def test_how_it_goes_and_how_it_ended(self, ledger: Ledger, ask: Callable[[int], list[Finding]]) -> None:
        ledger.workers.register(birth("w1", **CALM))
        job, other = running(ledger), running(ledger)
        put(ledger)
        [claimed] = claim_jobs(ledger)
        assert [one.code for one in ask(job.job_id)] == ["running"]
        assert [one.code for one in ask(claimed.job_id)] == ["starting"]
        turn(ledger, done=[done(job)], endings=[crash(other)])
        assert [one.code for one in ask(job.job_id)] == ["succeeded"]
        [failed] = ask(other.job_id)
        assert (failed.code, failed.severity) == ("failed", Severity.WARNING)
        assert "WORKER_CRASHED" in failed.why

    def test_whose_worker_is_dead_and_nobody_sweeps(
        self, ledger: Ledger, ask: Callable[[int], list[Finding]], meddler: Backdoor
    ) -> None:
        ledger.workers.register(birth("w1", **CALM))
        ledger.workers.register(birth("w2", **CALM))
        job = running(ledger, "w2")
        ledger.recovery.declare_dead("w2", verdict(), GuardNone())
        for worker_id in ("w1", "w2"):
            meddler.age_worker(worker_id, 3600.0)
        assert {one.code for one in ask(job.job_id)} == {"dead-worker-holds-jobs", "no-reaper"}
