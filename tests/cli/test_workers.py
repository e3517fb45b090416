"""Workers, queues and stale jobs by hand."""

import pytest
from tests.support.cli import RETRIED, Cli
from tests.support.fleet import wait_for

WORKER_FIELDS = {
    "id",
    "name",
    "host",
    "pid",
    "state",
    "queues",
    "created_at",
    "last_seen_at",
    "running",
    "processed",
    "version",
    "metadata",
    "verdict",
}
INTERVAL_S, TIMEOUT_S = 0.2, 0.5
SILENT = {"heartbeat_interval": INTERVAL_S, "heartbeat_timeout": TIMEOUT_S}


class TestWorkers:
    def test_the_fields_of_a_worker(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        [worker] = shop.run("workers", "--json").json
        assert worker.keys() >= WORKER_FIELDS
        assert (worker["id"], worker["name"], worker["state"]) == ("w1", "ada", "active")
        assert worker["queues"] == ["default"]
        assert worker["metadata"] == {"zone": "a"}
        assert worker["verdict"] is None
        header, line = shop.run("workers").out.splitlines()
        assert header.split()[:3] == ["NAME", "ID", "STATE"]
        assert line.split()[:3] == ["ada", "w1", "active"]

    def test_the_dead_are_shown_with_their_verdict(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs()
        shop.claim(start=True)
        shop.report_death()
        [worker] = shop.run("workers", "--json").json
        assert worker["state"] == "dead"
        assert worker["verdict"]["detector"] == "neighbour"
        assert worker["verdict"]["evidence"] == "its process no longer exists"
        assert worker["verdict"]["by"] == "reaper"
        assert "neighbour: its process no longer exists; holds 1 job" in shop.run("workers").out

    def test_nobody_there_is_said(self, shop: Cli) -> None:
        shop.run("migrate")
        said = shop.run("workers")
        assert (said.code, said.out) == (0, "")
        assert "unstuck worker" in said.err

    @pytest.mark.parametrize("who", ["w1abc", "ada", "w1a"])
    def test_drain_and_stop_by_id_name_and_prefix(self, who: str, shop: Cli) -> None:
        shop.worker("w1abc", "ada")
        shop.worker("w2abc", "bob")
        assert shop.run("workers", "drain", who, "--json").json == {"id": "w1abc", "name": "ada", "request": "drain"}
        with shop.ledger() as ledger:
            assert {worker.id: worker.request for worker in ledger.workers.list()} == {"w1abc": "drain", "w2abc": None}
        said = shop.run("--json", "workers", "stop", who)
        assert said.json["request"] == "stop"

    def test_an_ambiguous_worker_is_not_guessed(self, shop: Cli) -> None:
        shop.worker("w1abc", "ada")
        shop.worker("w1xyz", "ada")
        for who in ("ada", "w1"):
            sentence = shop.refused(1, "workers", "drain", who)
            assert "w1abc" in sentence
            assert "w1xyz" in sentence

    def test_a_name_means_the_living_one(self, shop: Cli) -> None:
        shop.worker("w1", "ada")
        shop.report_death("w1")
        assert "there is nobody to ask" in shop.refused(1, "workers", "stop", "ada")
        shop.worker("w2", "ada")
        assert shop.run("workers", "stop", "ada", "--json").json["id"] == "w2"


class TestSwitching:
    def test_a_worker_is_switched_off_and_on(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker("w1", "ada")
        shop.jobs()
        said = shop.run("workers", "disable", "ada", "--reason", "bad memory")
        assert "Worker ada (w1)" in said.out
        assert "Nobody serves default now" in said.out
        [worker] = shop.run("workers", "--json").json
        assert (worker["state"], worker["disabled"]["reason"], worker["health"]["score"]) == (
            "active",
            "bad memory",
            1.0,
        )
        assert "bad memory" in shop.run("workers").out
        waiting = shop.run("job", "1", "--json").json["waiting"]
        assert waiting.startswith("The worker that could take it is disabled (by ")
        assert "`unstuck workers enable ada` lets it go on" in waiting
        assert shop.run("workers", "enable", "w1", "--json").json["changed"] is True
        assert "was not disabled" in shop.run("workers", "enable", "w1").out
        assert shop.run("workers", "--json").json[0]["disabled"] is None

    def test_a_host_is_switched_off_and_on(self, shop: Cli) -> None:
        shop.worker("w1", "ada")
        [worker] = shop.run("workers", "--json").json
        host = worker["host"]
        assert shop.run("workers", "disable", "--host", host, "--json").json == {
            "workers": ["w1"],
            "host": host,
            "disabled": True,
            "unserved": ["default"],
        }
        assert shop.run("workers", "--json").json[0]["disabled"]["of_host"] is True
        assert f"enable --host {host}" in shop.run("workers", "enable", "ada").out
        assert "is enabled" in shop.run("workers", "enable", "--host", host).out

    def test_what_can_not_be_meant_is_refused(self, shop: Cli) -> None:
        shop.worker("w1", "ada")
        assert "one worker, or one host" in shop.refused(2, "workers", "disable")
        assert "one worker, or one host" in shop.refused(2, "workers", "enable", "ada", "--host", "x")
        assert "No worker is known on host 'nowhere'" in shop.refused(1, "workers", "disable", "--host", "nowhere")
        shop.report_death("w1")
        assert "there is nobody to disable" in shop.refused(1, "workers", "disable", "ada")


class TestQueues:
    def test_pause_and_resume(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker(queues=("default", "scrapes"))
        shop.jobs(2)
        assert shop.run("pause", "default", "--json").json == {"paused": ["default"]}
        assert "Nothing to do" in shop.run("pause", "default").out
        queues = {queue["name"]: queue for queue in shop.run("queues", "--json").json}
        assert queues["default"]["paused"] is True
        assert queues["default"]["pending"] == 2
        assert queues["scrapes"]["paused"] is False
        waiting = shop.run("job", "1", "--json").json["waiting"]
        assert waiting == "Queue 'default' is paused; `unstuck resume default` lets it go on."
        assert shop.run("resume", "--all", "--json").json == {"resumed": ["default"]}
        assert set(shop.run("pause", "--all", "--json").json["paused"]) == {"default", "scrapes"}

    def test_a_queue_that_nobody_serves_is_seen(self, shop: Cli) -> None:
        shop.jobs()
        header, line = shop.run("queues").out.splitlines()
        assert header.split()[:3] == ["QUEUE", "STATE", "PENDING"]
        assert "no living worker serves it" in line

    def test_purge_asks_for_a_word_where_nobody_can_be_asked(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(3)
        shop.claim(start=True)
        assert "Say --yes" in shop.refused(2, "purge", "default")
        assert shop.run("purge", "default", "--yes", "--json").json == {"queue": "default", "cancelled": 2}
        states = sorted(job["state"] for job in shop.run("jobs", "--json").json)
        assert states == ["cancelled", "cancelled", "running"]


class TestWhyAJobWaits:
    def test_nobody_serves_its_queue(self, shop: Cli) -> None:
        shop.jobs()
        assert "No living worker serves queue 'default'" in self._reason(shop)
        shop.worker(queues=("other",))
        assert "(1 worker serves other queues)" in self._reason(shop)

    def test_nobody_knows_its_task(self, shop: Cli) -> None:
        shop.worker()
        shop.jobs(task="resize")
        assert self._reason(shop).startswith("The worker of queue 'default' does not know task 'resize'")

    def test_it_waits_for_a_slot(self, shop: Cli) -> None:
        shop.worker()
        shop.jobs(3)
        assert self._reason(shop) == "It waits for one of 4 slots on 1 worker; 3 jobs of queue 'default' wait."

    def test_every_worker_is_leaving(self, shop: Cli) -> None:
        shop.worker()
        shop.jobs()
        shop.run("workers", "drain", "ada")
        assert "is shutting down" in self._reason(shop)

    def test_its_worker_is_silent_and_recovery_is_off(self, shop: Cli) -> None:
        silent = shop.with_settings(auto_fail_stale_running=False, **SILENT)
        silent.worker()
        silent.jobs()
        silent.claim(start=True)
        _wait_silent(silent)
        # The command runs without the worker's settings: what holds for the job is stored with its worker.
        reason = self._reason(shop)
        assert reason.startswith("Its worker ada (w1) on ")
        assert "has been silent for" in reason
        assert "automatic recovery is switched off: `unstuck stale --fail`" in reason
        assert "left: 1" in shop.run("reaper", "--once").out
        assert shop.run("job", "1", "--json").json["state"] == "running"
        assert "switched off" in shop.run("why", "1").out
        assert "switched off" in shop.run("doctor", "1").out

    def test_a_running_job_of_a_living_worker_does_not_wait(self, shop: Cli) -> None:
        shop.worker()
        shop.jobs()
        shop.claim(start=True)
        assert shop.run("job", "1", "--json").json["waiting"] is None

    def _reason(self, shop: Cli, **environment: str) -> str:
        return str(shop.run("job", "1", "--json", **environment).json["waiting"])


class TestStale:
    def test_the_jobs_of_the_living_are_never_stale(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(2)
        shop.claim()
        shop.claim(start=True)
        assert shop.run("stale", "--json").json == []
        for verb in ("--fail", "--requeue"):
            assert shop.run("stale", verb, "--older-than", "0s", "--json").json == []
        assert {job["state"] for job in shop.run("jobs", "--json").json} == {"claimed", "running"}

    @pytest.fixture
    def silent_shop(self, either_shop: Cli) -> Cli:
        """Job 1 runs, 2 is claimed, 3 runs and may be retried; their worker fell silent."""
        shop = either_shop.with_settings(**SILENT)
        shop.worker(queues=("default", "scrapes"))
        shop.jobs(2)
        shop.jobs(1, policy=RETRIED, task="crawl", queue="scrapes")
        [first] = shop.claim(start=True)
        assert first.job_id == 1
        shop.claim()
        shop.claim(start=True, queue="scrapes")
        _wait_silent(shop)
        return shop

    def test_are_listed_with_their_host(self, silent_shop: Cli) -> None:
        found = silent_shop.run("stale", "--json").json
        assert {job["job_id"] for job in found} == {1, 2, 3}
        assert {job["action"] for job in found} == {"none"}
        for job in found:
            assert job["worker"] == "w1"
            assert job["host"]
            assert job["silent_s"] >= TIMEOUT_S
        assert silent_shop.run("stale", "--older-than", "1h", "--json").json == []
        header = silent_shop.run("stale").out.splitlines()[0]
        assert header.split()[:4] == ["JOB", "STATE", "TASK", "QUEUE"]

    def test_fail_ends_what_ran_and_says_who_did_it(self, silent_shop: Cli) -> None:
        said = silent_shop.run("stale", "--fail")
        assert said.code == 0, said
        assert "Failed 2 stale jobs." in said.out
        assert "Left 1 claimed job: user code never ran; --requeue gives them back." in said.err
        job = silent_shop.run("job", "1", "--json").json
        assert job["state"] == "failed"
        assert job["error"]["code"] == "WORKER_CRASHED"
        assert job["error"]["message"] == "Worker died unexpectedly"
        assert "by operator" in job["error"]["cause"]
        # Even where the policy would retry: an operator said fail.
        assert silent_shop.run("job", "3", "--json").json["state"] == "failed"
        assert silent_shop.run("job", "2", "--json").json["state"] == "claimed"

    def test_requeue_gives_back_only_what_is_safe(self, silent_shop: Cli) -> None:
        done = silent_shop.run("stale", "--requeue", "--json").json
        assert {job["job_id"]: job["action"] for job in done} == {2: "requeued", 3: "requeued"}
        claimed = silent_shop.run("job", "2", "--json").json
        assert claimed["state"] == "pending"
        assert claimed["attempts"] == []
        assert [event["message"] for event in claimed["events"]] == ["Task re-queued due to stale worker: w1"]
        retried = silent_shop.run("job", "3", "--json").json
        assert retried["state"] == "pending"
        assert retried["crash_count"] == 1
        assert silent_shop.run("job", "1", "--json").json["state"] == "running"
        assert "Left 1 running job: user code was at work" in silent_shop.run("stale", "--requeue").err

    def test_a_higher_threshold_leaves_them_alone(self, silent_shop: Cli) -> None:
        assert silent_shop.run("stale", "--fail", "--older-than", "1h", "--json").json == []
        assert silent_shop.run("stale", "--requeue", "--older-than", "1h", "--json").json == []

    def test_the_dead_need_no_patience(self, either_shop: Cli) -> None:
        either_shop.worker()
        either_shop.jobs()
        either_shop.claim(start=True)
        either_shop.report_death()
        [job] = either_shop.run("stale", "--fail", "--json").json
        assert job["worker_state"] == "dead"
        assert job["action"] == "failed"


def test_one_round_of_the_reaper_settles_the_silent(shop: Cli) -> None:
    silent = shop.with_settings(**SILENT)
    silent.worker()
    silent.jobs()
    silent.claim(start=True)
    _wait_silent(silent)
    counts = shop.run("reaper", "--once", "--json", UNSTUCK_HEARTBEAT_INTERVAL="0.2s", UNSTUCK_HEARTBEAT_TIMEOUT="0.5s")
    assert counts.json["buried"] == 1
    assert shop.run("job", "1", "--json").json["error"]["code"] == "WORKER_CRASHED"


def _wait_silent(shop: Cli) -> None:
    with shop.ledger() as ledger:
        wait_for(lambda: ledger.recovery.stale(TIMEOUT_S), "the worker to have been silent for its timeout")


def test_a_beating_worker_of_this_host_is_alive(either_shop: Cli) -> None:
    either_shop.worker()
    said = either_shop.run("alive")
    assert (said.code, said.out.startswith("1 worker alive on ")) == (0, True), said
    assert either_shop.run("alive", "--json").json["workers"] == ["w1"]
    short = either_shop.run("alive", "--workers", "2")
    assert short.code == 1
    assert short.out.startswith("Only 1 of 2 workers beat on ")


def test_a_dead_worker_is_not_alive(shop: Cli) -> None:
    shop.worker()
    shop.report_death()
    said = shop.run("alive", "--forgive-outage")
    assert said.code == 1
    assert "(in this pid namespace) is registered in the ledger" in said.out


def test_an_outage_is_forgiven_only_where_that_was_asked_for(shop: Cli) -> None:
    nowhere = ("--url", "postgresql://127.0.0.1:9/nobody")
    assert shop.run("alive", *nowhere).code == 1
    said = shop.run("alive", "--forgive-outage", *nowhere)
    assert said.code == 0
    assert "The ledger cannot be reached, which is no reason to restart" in said.out
