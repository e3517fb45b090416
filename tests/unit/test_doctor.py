"""Each of the doctor's checks on facts alone: silent on the healthy, and never silent on the sick."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import run_guard
from tests.support.doctor import HERE, NOW_AT, diagnosis, facts, found, ready, told, with_, worker

from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Facts, IdleLook, LedgerTrouble
from unstuck.client.doctor.findings import MAX_ALIKE
from unstuck.domain.conditions import Code, Severity
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import Transport, WorkerState
from unstuck.domain.watch_clock import Cause
from unstuck.domain.worker_health import Disabled
from unstuck.ledger.contract.diagnosis import (
    COUNT_LIMIT,
    Blocker,
    JobGroup,
    QueueBacklog,
    RetentionLag,
    Snapshot,
    TableLook,
    TaskBacklog,
    Waiter,
    WatchLook,
)
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import WorkerRecord, WorkerVerdict
from unstuck.runner import cgroups

HALF_OF_THE_TIMEOUT = {"heartbeat_interval": "15s", "heartbeat_timeout": "30s"}
GROUP = JobGroup("default", "add", 3, 17, 90_000.0)


def test_a_healthy_system_gives_no_problem_and_no_warning() -> None:
    healthy = facts(worker(), worker("bob"), queues=(ready(),))
    assert found(healthy) == {}
    assert told(healthy) == {"containment"}


def test_every_code_is_on_the_page_and_the_page_knows_no_other() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == {code.value for code in Code}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("unreachable", "ledger-unreachable"),
        ("busy", "ledger-unreachable"),
        ("standby", "standby"),
        ("none", "no-ledger"),
        ("behind", "schema-behind"),
        ("ahead", "schema-ahead"),
        ("forked", "schema-forked"),
    ],
)
def test_a_ledger_that_cannot_be_looked_at_is_the_finding(kind: Any, code: str) -> None:
    lost = Facts(facts().settings, HERE, trouble=LedgerTrouble(kind, "The server is gone."))
    [finding] = found(lost).values()
    assert (finding.code, finding.severity, finding.why) == (code, Severity.PROBLEM, "The server is gone.")


class TestRecovery:
    def test_nobody_takes_the_ticket(self) -> None:
        assert "no-reaper" in found(facts(unswept_s=60.0))
        assert "no-reaper" in found(facts(unswept_s=None))
        assert "no-reaper" not in found(facts(unswept_s=14.0))

    def test_a_fleet_that_was_just_started_is_given_time(self) -> None:
        assert found(facts(worker(created_at=NOW_AT - 5), unswept_s=3600.0)) == {}

    def test_workers_with_a_slow_round_are_given_theirs(self) -> None:
        slow = worker(metadata={"settings": {"check_interval_s": 20}})
        assert "no-reaper" not in found(facts(slow, unswept_s=60.0))

    def test_an_empty_house_needs_no_reaper(self) -> None:
        assert found(facts(worker(state=WorkerState.STOPPED, stopped_at=NOW_AT - 60), unswept_s=None)) == {}

    @pytest.mark.parametrize(
        ("switch", "code"),
        [
            ("auto_requeue_stale_claimed", "requeue-switched-off"),
            ("auto_fail_stale_running", "fail-switched-off"),
        ],
    )
    def test_a_switch_is_seen_here_and_in_the_workers(self, switch: str, code: str) -> None:
        assert set(found(facts(settings={switch: False}))) == {code}
        finding = found(facts(worker(rules=RecoveryRules(**{switch: False}))))[code]
        assert finding.facts["workers"] == ["ada"]
        assert finding.severity is Severity.WARNING


class TestFleet:
    def test_a_worker_that_its_own_deaths_disabled_is_told_of_while_others_do_its_work(self) -> None:
        off = Disabled("5 jobs died in its runners", "the reaper", NOW_AT, auto=True)
        finding = found(facts(worker(), worker("bob", disabled=off)))["worker-disabled"]
        assert finding.severity is Severity.WARNING
        assert "5 jobs died in its runners" in finding.why
        assert "`unstuck workers enable id-of-bob`" in finding.cure

    def test_a_worker_on_which_every_job_dies_is_a_problem_even_if_it_is_the_only_one(self) -> None:
        def dying(**health: Any) -> WorkerRecord:
            return msgspec.structs.replace(worker("bob"), metadata={"health": {"in_a_row": 3, **health}})

        finding = found(facts(dying(deaths=3)))["everything-dies"]
        assert finding.severity is Severity.PROBLEM
        assert finding.facts["jobs"] == 3
        # Its weight fades sooner than its jobs come back; and what died in one moment may have one cause.
        assert "everything-dies" in found(facts(dying(deaths=0)))
        assert found(facts(dying(deaths=1))) == {}
        assert found(facts(msgspec.structs.replace(dying(deaths=3), transport=Transport.HTTP))) == {}

    def test_a_host_that_an_operator_disabled_is_information(self) -> None:
        off = Disabled("new memory", "ada@desk", NOW_AT, of_host=True)
        assert found(facts(worker(), worker("bob", disabled=off))) == {}
        [finding] = [one for one in examine(facts(worker(disabled=off))) if one.code is Code.WORKER_DISABLED]
        assert finding.severity is Severity.INFO
        assert f"`unstuck workers enable --host {HERE}`" in finding.cure

    def test_a_late_beat_is_not_a_silent_worker(self) -> None:
        assert found(facts(worker(silent_s=9.9))) == {}
        assert "late-beats" in found(facts(worker(silent_s=10.5)))
        silent = found(facts(worker(silent_s=31.0)))
        assert silent["silent-worker"].severity is Severity.WARNING
        assert "late-beats" not in silent

    def test_a_silent_worker_with_jobs_is_a_problem(self) -> None:
        suspect = worker(state=WorkerState.SUSPECT, silent_s=2.0, held=3)
        finding = found(facts(suspect))["silent-worker"]
        assert finding.severity is Severity.PROBLEM
        assert "holds 3 jobs" in finding.what

    def test_the_dead_that_hold_jobs_are_seen_when_nobody_settles_them(self) -> None:
        verdict = WorkerVerdict(WorkerState.DEAD, Detector.LEASE, "no heartbeat", 31.0, "reaper")
        dead = worker("bob", state=WorkerState.DEAD, held=2, stopped_at=NOW_AT - 60, verdict=verdict)
        finding = found(facts(worker(), dead))["dead-worker-holds-jobs"]
        assert finding.severity is Severity.PROBLEM
        assert "no heartbeat" in finding.why
        just_died = worker("bob", state=WorkerState.DEAD, held=2, stopped_at=NOW_AT - 1)
        assert found(facts(worker(), just_died)) == {}

    def standstill(self, **after: Any) -> Facts:
        seen = IdleLook(worker(), worker(**after), 5.0, (17, 18), (17, 18), ("default",))
        return with_(facts(), standstills=(seen,))

    def test_alive_but_doing_nothing(self) -> None:
        finding = found(self.standstill())["idle-worker"]
        assert finding.severity is Severity.PROBLEM
        assert "4 free slots" in finding.why
        assert "job 17" in finding.why

    @pytest.mark.parametrize(
        "after",
        [
            {"processed": 8},
            {"held": 1},
            {"running": 4},
            {"request": "stop"},
            {"state": WorkerState.DRAINING},
            {"disabled": Disabled("broken disk", "ada", NOW_AT)},
        ],
        ids=str,
    )
    def test_whoever_moved_or_could_not_is_not_accused(self, after: dict[str, Any]) -> None:
        assert "idle-worker" not in found(self.standstill(**after))

    def test_alive_and_sitting_on_what_it_took(self) -> None:
        still, later = worker(held=4, running=1), worker(held=4, running=1, last_seen_at=NOW_AT)
        finding = found(with_(facts(), standstills=(IdleLook(still, later, 5.0, (), (), ()),)))["idle-worker"]
        assert "has 3 free slots, and it holds 4 jobs and runs 1 of them" in finding.why
        assert finding.facts["worker"] == still.id

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"held": 4, "running": 0}, {"held": 4, "running": 4}),
            ({"held": 4, "running": 1}, {"held": 4, "running": 2}),
            ({"held": 8, "running": 4}, {"held": 8, "running": 4}),
            ({"held": 4, "running": 0}, {"held": 4, "running": 0, "processed": 9}),
            ({"held": 4, "running": 0}, {"held": 0, "running": 0}),
            ({"held": 4, "running": 0}, {"held": 4, "running": 0, "last_seen_at": NOW_AT - 1}),
        ],
        ids=str,
    )
    def test_whoever_begins_or_ends_or_has_its_hands_full_is_not_accused(
        self, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        seen = IdleLook(worker(**before), worker(**{"last_seen_at": NOW_AT, **after}), 5.0, (), (), ())
        assert "idle-worker" not in found(with_(facts(), standstills=(seen,)))

    def test_nobody_is_accused_when_the_line_moved(self) -> None:
        seen = IdleLook(worker(), worker(), 5.0, (17, 18), (18,), ("default",))
        assert found(with_(facts(), standstills=(seen,))) == {}


class TestClocks:
    @pytest.mark.parametrize(("off_s", "side"), [(3.0, "3s ahead of"), (-3.0, "3s behind")])
    def test_this_hosts_clock(self, off_s: float, side: str) -> None:
        assert side in found(facts(clock_off_s=off_s))["clock-differs"].what
        assert found(facts(clock_off_s=off_s / 2)) == {}

    def test_the_clock_of_a_workers_host(self) -> None:
        born_at = NOW_AT - 3600
        away = worker(host="there", created_at=born_at, metadata={"clock_at": born_at - 90.0})
        finding = found(facts(away))["clock-differs"]
        assert finding.what == "The clock of host there is 90s behind the database's"
        assert found(facts(worker(host="there", created_at=born_at, metadata={"clock_at": born_at - 0.5}))) == {}

    def test_one_host_has_one_clock(self) -> None:
        away = worker(host="there", metadata={"clock_at": 5.0})
        assert found(facts(away, clock_off_s=None)) == {}


class TestWatch:
    def test_a_large_step_is_a_warning_and_a_small_one_is_information(self) -> None:
        large = WatchLook(Cause.CLOCK, NOW_AT - 600, 3600.0)
        finding = found(facts(watch=(large,)))["clock-step"]
        assert finding.what == "The ledger's clock was set forward by about 1h"
        assert "10m ago" in finding.why
        small = facts(watch=(WatchLook(Cause.CLOCK, NOW_AT - 600, 12.0),))
        assert found(small) == {}
        assert "clock-step" in told(small)

    def test_a_step_back_is_told_whatever_began_the_period(self) -> None:
        back = WatchLook(Cause.START, NOW_AT - 600, None, 7200.0, NOW_AT - 60)
        finding = found(facts(watch=(back,)))["clock-step"]
        assert finding.what == "The ledger's clock was set back by about 2h"
        assert finding.facts["ago_s"] == 60.0

    def test_what_is_old_or_tiny_is_not_told(self) -> None:
        old = WatchLook(Cause.CLOCK, NOW_AT - 100_000, 3600.0, 3600.0, NOW_AT - 90_000)
        tiny = WatchLook(Cause.CLOCK, NOW_AT - 60, 1.5, 0.2, NOW_AT - 5)
        gone = WatchLook(Cause.OUTAGE, NOW_AT - 100_000, 60.0)
        assert told(facts(watch=(tiny, old, gone))) == {"containment"}

    def test_each_cause_of_an_outage_is_told_once(self) -> None:
        outages = [WatchLook(Cause.OUTAGE, NOW_AT - 100 * n, 10.0 * n) for n in (1, 2, 3)]
        failover = WatchLook(Cause.FAILOVER, NOW_AT - 5, 0.3)
        findings = [one for one in examine(facts(watch=(failover, *outages))) if one.code is Code.LEDGER_OUTAGE]
        assert [one.facts["cause"] for one in findings] == ["outage", "failover"]
        assert findings[0].facts["count"] == 3
        assert "ended 100s ago and took 10s. The longest was 30s." in findings[0].why


class TestBlocking:
    OPEN = Blocker("session", "99", 12.0, "shop", "cart", "idle in transaction", "insert into orders …", ("jobs",))

    def blocked(self, *blockers: Blocker, trouble: LedgerTrouble | None = None) -> Facts:
        return with_(facts(), blockers=blockers, trouble=trouble)

    def test_an_open_transaction_is_a_warning(self) -> None:
        finding = found(self.blocked(self.OPEN))["blocking-transaction"]
        assert finding.severity is Severity.WARNING
        assert finding.what == (
            "Session 99 (user shop, application 'cart', idle in transaction) has had a transaction open for 12s"
        )
        assert "in jobs." in finding.why
        assert "Its last statement: insert into orders" in finding.why
        assert "`select pg_terminate_backend(99)`" in finding.cure
        assert found(self.blocked(msgspec.structs.replace(self.OPEN, age_s=4.0))) == {}

    def test_it_is_a_problem_if_something_waits(self) -> None:
        waiting = tuple(Waiter(pid, "unstuck turn") for pid in range(7))
        finding = found(self.blocked(msgspec.structs.replace(self.OPEN, waiting=waiting)))["blocking-transaction"]
        assert finding.severity is Severity.PROBLEM
        assert "7 sessions wait for it: unstuck turn (0), unstuck turn (1)" in finding.why
        assert "and 2 more." in finding.why

    def test_it_says_more_than_a_ledger_that_did_not_answer_in_time(self) -> None:
        busy = LedgerTrouble("busy", "A lock was held for too long.")
        assert set(found(self.blocked(self.OPEN, trouble=busy))) == {"blocking-transaction"}
        assert set(found(self.blocked(trouble=busy))) == {"ledger-unreachable"}

    def test_a_transaction_that_we_may_not_look_at_is_information(self) -> None:
        hidden = Blocker("session", "99", None, "shop", tables=("jobs",))
        assert found(self.blocked(hidden)) == {}
        assert "blocking-transaction" in told(self.blocked(hidden))

    def test_a_prepared_transaction_has_no_session_to_end(self) -> None:
        prepared = Blocker("prepared", "tx1", 60.0, tables=("jobs",))
        assert "ROLLBACK PREPARED 'tx1'" in found(self.blocked(prepared))["blocking-transaction"].cure

    def test_a_process_that_keeps_the_write_lock_of_a_file(self) -> None:
        finding = found(self.blocked(Blocker("process", "4711", 1.5, query="sqlite3 jobs.db")))["blocking-transaction"]
        assert finding.severity is Severity.PROBLEM
        assert finding.what == "Process 4711 (sqlite3 jobs.db) keeps the write lock of the ledger's file"
        assert "`kill 4711`" in finding.cure
        unknown = found(self.blocked(Blocker("process", "", 1.5)))["blocking-transaction"]
        assert unknown.what.startswith("Another process keeps the write lock")


class TestBell:
    def test_switched_off_is_information(self) -> None:
        assert found(facts(wakeup_reachable="off")) == {}
        assert "notify-off" in told(facts(wakeup_reachable="off"))
        assert "notify-off" in told(facts(worker(metadata={"settings": {"notify": False}})))

    def test_a_pooler_without_a_way_around_it(self) -> None:
        pooled = facts(pooler=True, wakeup_reachable="pooled")
        assert set(found(pooled)) == {"pooler-without-listen-url"}
        assert "pooler" in told(pooled)
        assert found(facts(pooler=True)) == {}

    def test_a_notify_that_nobody_hears(self) -> None:
        finding = found(facts(wakeup_reachable="silent", wakeup_note="nothing came"))["notify-silent"]
        assert "nothing came" in finding.why
        assert finding.severity is Severity.WARNING

    def test_a_bell_in_another_container(self) -> None:
        assert "bell-unreachable" in found(facts(deaf=("id-of-ada",)))
        assert found(facts(deaf=("somebody-gone",))) == {}


class TestHousekeeping:
    def test_retention_that_does_not_keep_up(self) -> None:
        finding = found(facts(overkept=(RetentionLag("jobs", 3 * 3600.0),)))["retention-behind"]
        assert finding.what == "Retention is behind: the oldest finished job should have been removed 3h ago"
        assert finding.severity is Severity.WARNING
        assert found(facts(overkept=(RetentionLag("keys", 60.0),))) == {}, "it looks once a minute"

    def test_dead_rows_that_vacuum_does_not_reach(self) -> None:
        swamped = TableLook("jobs", 100_000, 90_000, 2**27, 3600.0, True)
        assert found(facts(tables=(swamped,)))["dead-rows"].facts["dead_rows"] == 90_000
        assert found(facts(tables=(TableLook("jobs", 100_000, 90_000, 2**27, 60.0, True),))) == {}
        assert found(facts(tables=(TableLook("jobs", 100_000, 60_000, 2**27, 3600.0, True),))) == {}

    def test_beats_may_leave_fewer(self) -> None:
        assert "dead-rows" in found(facts(tables=(TableLook("worker_heartbeats", 10, 6_000, 2**20, 3600.0, True),)))

    def test_autovacuum_that_is_off(self) -> None:
        assert "autovacuum-off" in found(facts(tables=(TableLook("jobs", 10, 0, 2**20, 1.0, False),)))

    @pytest.mark.parametrize(
        ("old", "cure"),
        [
            (Snapshot("session", "99", "bi, idle in transaction", 3600.0), "pg_terminate_backend(99)"),
            (Snapshot("prepared", "tx1", "bi", 3600.0), "ROLLBACK PREPARED 'tx1'"),
            (Snapshot("slot", "replica", "physical", None, False, 10), "pg_drop_replication_slot('replica')"),
            (Snapshot("slot", "replica", "physical", None, True, 2_000_000), "pg_drop_replication_slot('replica')"),
        ],
    )
    def test_what_holds_vacuum_back(self, old: Snapshot, cure: str) -> None:
        assert cure in found(facts(snapshots=(old,)))["old-snapshot"].cure

    @pytest.mark.parametrize(
        "young", [Snapshot("session", "99", "", 10.0), Snapshot("slot", "replica", "physical", None, True, 10)]
    )
    def test_what_is_in_use_holds_nothing_back(self, young: Snapshot) -> None:
        assert found(facts(snapshots=(young,))) == {}

    def test_a_file_that_is_mostly_empty(self) -> None:
        assert "free-space" in found(facts(size_bytes=2**30, free_bytes=2**30 * 3 // 4))
        assert found(facts(size_bytes=2**30, free_bytes=2**30 // 3)) == {}
        assert found(facts(size_bytes=2**20, free_bytes=2**20 * 3 // 4)) == {}

    def test_a_wal_that_grows_and_who_holds_it(self) -> None:
        assert set(found(facts(wal_bytes=2**29))) == {"wal-large"}
        finding = found(facts(wal_stuck_pages=2_500, readers=(4711,)))["wal-reader"]
        assert "4711" in finding.cure
        assert found(facts(wal_stuck_pages=10, wal_bytes=2**26)) == {}


class TestTiming:
    def test_an_interval_of_more_than_a_third_of_the_timeout(self) -> None:
        finding = found(facts(worker(heartbeat_interval_s=15.0)))["timeout-too-tight"]
        assert finding.severity is Severity.WARNING
        assert finding.what == "The heartbeat interval of ada (15s) is more than a third of heartbeat_timeout (30s)"
        assert finding.cure == "Set heartbeat_interval to 10s or less, or heartbeat_timeout to 45s or more."
        assert found(facts(worker(heartbeat_interval_s=10.0))) == {}, "a third is enough"

    def test_every_timeout_that_applies_to_a_worker_is_compared(self) -> None:
        told_so = {"settings": {"heartbeat_timeout_s": 30.0, "running_stale_after_s": 12.0}}
        finding = found(facts(worker(metadata=told_so)))["timeout-too-tight"]
        assert finding.facts["timeout"] == "running_stale_after"
        claimed = {"settings": {"heartbeat_timeout_s": 30.0, "running_stale_after_s": 30.0}}
        finding = found(facts(worker(suspect_after_s=10.0, metadata=claimed)))["timeout-too-tight"]
        assert finding.facts["timeout"] == "claimed_stale_after"

    def test_workers_and_settings_with_the_same_numbers_are_named_together(self) -> None:
        both = facts(
            worker(heartbeat_interval_s=15.0), worker("bob", heartbeat_interval_s=15.0), settings=HALF_OF_THE_TIMEOUT
        )
        findings = [one for one in examine(both) if one.code is Code.TIMEOUT_TOO_TIGHT]
        assert len(findings) == 1
        assert "of ada, bob and the settings that this command reads" in findings[0].what
        assert findings[0].facts["here"] is True

    def test_the_timeout_of_a_task_is_compared_with_the_workers_that_know_it(self) -> None:
        tasks = (
            TaskRecord("add", "default", encode_policy(Policy(heartbeat_timeout_s=8.0))),
            TaskRecord("unknown", "default", encode_policy(Policy(heartbeat_timeout_s=8.0))),
            TaskRecord("calm", "default", encode_policy(Policy(heartbeat_timeout_s=60.0))),
            TaskRecord("off", "default", encode_policy(Policy(heartbeat=False, heartbeat_timeout_s=8.0))),
        )
        workers = (worker(tasks=("add", "calm", "off")),)
        [finding] = [one for one in examine(with_(facts(*workers), tasks=tasks)) if one.code is Code.TIMEOUT_TOO_TIGHT]
        assert (
            finding.what
            == "The heartbeat interval of ada (5s) is more than a third of heartbeat_timeout (8s) of task 'add'"
        )

    def test_rounds_that_are_rarer_than_deaths(self) -> None:
        assert "check-interval-too-long" in found(facts(settings={"check_interval": "60s"}))
        told_so = worker(metadata={"settings": {"check_interval_s": 60, "heartbeat_timeout_s": 30.0}})
        assert "check-interval-too-long" in found(facts(told_so))

    def test_workers_that_live_by_different_settings(self) -> None:
        finding = found(facts(worker(), worker("bob", suspect_after_s=60.0)))["settings-differ"]
        assert finding.facts["settings"] == {"suspect_after_s": {"30.0": ["ada"], "60.0": ["bob"]}}
        one, other = ({"settings": {"notify": value}} for value in (True, False))
        assert "settings-differ" in found(facts(worker(metadata=one), worker("bob", metadata=other)))

    def test_workers_over_a_network_live_by_settings_of_their_own(self) -> None:
        stranger = worker("node", transport=Transport.HTTP, suspect_after_s=300.0, version="2.0")
        assert not {"settings-differ", "versions-differ"} & set(found(facts(worker(), stranger)))

    def test_workers_of_different_versions(self) -> None:
        assert set(found(facts(worker(), worker("bob", version="2.0")))) == {"versions-differ"}


class TestHost:
    def test_containment_is_told_by_workers(self) -> None:
        [finding] = examine(facts(worker(metadata={"containment": "subreaper: as far as it can be found (no cgroup)"})))
        assert (finding.code, finding.severity) == (Code.CONTAINMENT, Severity.INFO)
        assert finding.what == f"Containment on {HERE}: subreaper"
        assert "Delegate=yes" in finding.cure

    def test_a_kernel_that_kills_the_whole_group(self) -> None:
        assert "oom-group" in found(facts(worker(metadata={"oom_group": True})))
        assert found(facts(worker(metadata={"oom_group": False}))) == {}


def test_metadata_of_strangers_is_not_believed_blindly() -> None:
    odd = worker(metadata={"settings": ["x"], "clock_at": "noon", "containment": 3, "oom_group": "yes"})
    assert found(facts(odd)) == {}


def test_the_worst_comes_first() -> None:
    findings = examine(facts(quarantined=(GROUP,), unswept_s=None, wakeup_reachable="off"))
    assert [finding.severity.value for finding in findings] == ["problem", "warning", "info", "info"]


def test_a_diagnosis_is_enough_for_a_ledger_without_workers() -> None:
    assert found(Facts(facts().settings, HERE, diagnosis=diagnosis(unswept_s=None))) == {}


def test_a_worker_reads_whom_the_kernel_kills() -> None:
    """In a cgroup of our own, where this machine lets us make one below the one we are in.

    The switch exists only where cgroup v2 has the memory controller. Elsewhere "not known" is the right answer, and the
    finding is shown on facts alone (`TestHost`)."""
    base = cgroups.own()
    if base is None:
        pytest.skip("there is no cgroup v2 here")
    hall = base / f"unstuck-doctor-{os.getpid()}"
    try:
        hall.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    run_guard.note(hall)
    look = (
        "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); "
        "from unstuck.runner.containment import oom_group; print(oom_group())"
    )
    try:
        has_switch = (hall / "memory.oom.group").exists()
        if has_switch:
            (hall / "memory.oom.group").write_text("1")
        said = subprocess.run([sys.executable, "-c", look, str(hall)], capture_output=True, text=True, check=False)
        assert said.stdout.strip() == ("True" if has_switch else "None"), said.stderr
    finally:
        hall.rmdir()


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
        queue = QueueBacklog(
            "default", False, 5_000, (TaskBacklog("add", 900, 1, 2.0), TaskBacklog("resize", 4, 18, 60.0))
        )
        finding = found(facts(queues=(queue,)))["task-unknown"]
        assert finding.what == "At least 4 ready jobs wait for task 'resize' in queue 'default'"
        assert (finding.severity, finding.facts["example"]) == (Severity.PROBLEM, 18)

    def test_whoever_could_take_it_is_leaving(self) -> None:
        finding = found(facts(worker(request="drain"), queues=(ready(),)))["workers-leaving"]
        assert finding.severity is Severity.WARNING

    def test_a_paused_queue_is_a_warning_only_while_somebody_waits(self) -> None:
        finding = found(facts(queues=(ready(paused=True),)))["queue-paused"]
        assert finding.cure == "`unstuck resume default` lets it go on."
        idle = facts(queues=(QueueBacklog("default", True, 0),))
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
        paused = facts(queues=(QueueBacklog("mail", True, 0),), coming=(group,))
        assert found(paused) == {}
        assert found(facts(coming=(JobGroup("default", "add", 1, 17, 60.0),))) == {}

    def test_due_and_forgotten_is_a_problem(self) -> None:
        assert found(facts(overdue=(GROUP,)))["due-but-waiting"].severity is Severity.PROBLEM

    def test_the_quarantined_wait_for_somebody(self) -> None:
        finding = found(facts(quarantined=(GROUP,)))["quarantined"]
        assert finding.severity is Severity.WARNING
        assert "`unstuck retry 17`" in finding.cure

    def test_two_hundred_deserted_queues_do_not_bury_the_rest(self) -> None:
        findings = examine(facts(queues=tuple(ready(f"q{n}") for n in range(200))))
        alike = [finding for finding in findings if finding.code is Code.NO_WORKER_FOR_QUEUE]
        assert len(alike) == MAX_ALIKE + 1
        assert alike[-1].what == "180 more like these"
