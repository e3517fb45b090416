"""Enqueue, look, cancel, retry, prune: the life of jobs by hand."""

import json
import re
import threading

import pytest
from tests.support.cli import Cli
from tests.support.fleet import wait_for

from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import JobFilter

APP = """
from unstuck import App, Retry
app = App(queues=["reports"])

@app.task
def add(a, b=0):
    return a + b

@app.task(queue="scrapes", on_crash="retry", retry=Retry(max_attempts=5), timeout="5m")
def crawl(url):
    return url
"""

JOB_FIELDS = {"id", "task", "queue", "state", "result", "error", "crash_count", "attempts"}
ATTEMPT_FIELDS = {"token", "worker", "state", "started_at", "ended_at", "cause"}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class TestEnqueue:
    def test_with_an_app_makes_the_ledger_and_prints_the_id(self, either_shop: Cli) -> None:
        shop = either_shop
        (shop.folder / "app.py").write_text(APP)
        said = shop.run("enqueue", "crawl", '"https://x"', "--app", "app:app", "--priority", "-5")
        assert said.code == 0, said
        job = shop.run("job", said.out.strip(), "--json").json
        assert job["task"] == "crawl"
        assert job["queue"] == "scrapes"
        assert job["state"] == "pending"
        assert job["args"] == ["https://x"]
        assert job["priority"] == -5
        assert job["policy"]["on_crash"] == "retry"
        assert job["policy"]["retry"]["max_attempts"] == 5
        assert job["policy"]["timeout_s"] == 300

    def test_by_the_name_that_a_worker_wrote_down(self, shop: Cli) -> None:
        shop.worker()
        said = shop.run("enqueue", "crawl", "1", "-2.5", "null", '{"a": [true]}', "--kwargs", '{"depth": 2}', "--json")
        job = shop.run("job", str(said.json["id"]), "--json").json
        assert job["args"] == [1, -2.5, None, {"a": [True]}]
        assert job["kwargs"] == {"depth": 2}
        assert job["queue"] == "scrapes"
        assert job["policy"]["on_crash"] == "retry"

    def test_url_wins_over_the_app(self, shop: Cli) -> None:
        (shop.folder / "app.py").write_text(APP.replace("App(", 'App("sqlite:///of_app.db", '))
        other = f"sqlite:///{shop.folder}/other.db"
        assert shop.run("enqueue", "add", "1", "--app", "app:app", "--url", other).code == 0
        assert not (shop.folder / "of_app.db").exists()
        assert len(shop.run("jobs", "--json", "--url", other).json) == 1

    def test_a_unique_key_gives_the_job_that_is_there(self, shop: Cli) -> None:
        shop.worker()
        first = shop.run("enqueue", "add", "1", "--unique-key", "once", "--json").json
        second = shop.run("enqueue", "add", "2", "--unique-key", "once", "--json").json
        assert first["fresh"] is True
        assert second == {"id": first["id"], "task": "add", "fresh": False}

    def test_a_delay_is_seen(self, shop: Cli) -> None:
        shop.worker()
        number = shop.run("enqueue", "add", "1", "--delay", "3h").out.strip()
        assert "scheduled for" in shop.run("job", number, "--json").json["waiting"]
        assert "due in 3h" in shop.run("jobs").out

    def test_no_migrate_leaves_the_place_alone(self, shop: Cli) -> None:
        assert "unstuck migrate" in shop.refused(1, "enqueue", "add", "--no-migrate")
        assert not (shop.folder / "jobs.db").exists()

    def test_wait_prints_the_result(self, shop: Cli) -> None:
        shop.worker()
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(shop.run("enqueue", "add", "1", "2", "--wait")))
        waiting.start()
        self._settle_first(shop, b'{"sum":3}')
        waiting.join(30)
        assert answers[0].code == 0  # type: ignore[attr-defined]
        assert json.loads(answers[0].out) == {"sum": 3}  # type: ignore[attr-defined]

    def test_wait_for_a_failure_exits_with_its_sentence(self, shop: Cli) -> None:
        shop.worker()
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(shop.run("enqueue", "add", "1", "--wait")))
        waiting.start()
        self._settle_first(shop, None)
        waiting.join(30)
        assert answers[0].code == 1  # type: ignore[attr-defined]
        assert "unstuck: ValueError: boom (job 1)" in answers[0].err  # type: ignore[attr-defined]

    def test_wait_never_waits_in_the_dark(self, shop: Cli) -> None:
        (shop.folder / "app.py").write_text(APP)
        said = shop.run("enqueue", "add", "1", "--app", "app:app", "--wait", "--timeout", "1500ms")
        assert said.code == 1
        assert "Job 1 waits: No living worker serves queue 'default'" in said.err
        assert "unstuck: Job 1 did not end within 1.5s: No living worker serves queue 'default'" in said.err

    def _settle_first(self, shop: Cli, result: bytes | None) -> None:
        with shop.ledger() as ledger:
            wait_for(lambda: ledger.jobs.list(_PENDING), "a job that waits")
        [held] = shop.claim(start=True)
        shop.succeed(held, result) if result is not None else shop.fail(held)


class TestLooking:
    def test_the_story_of_a_success(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(enqueued_by="me")
        [held] = shop.claim(start=True)
        shop.succeed(held, b'[1,{"a":null}]', stdout=b"hello\n", stderr=b"a warning")
        job = shop.run("job", str(held.job_id), "--json").json
        assert job.keys() >= JOB_FIELDS
        assert job["state"] == "succeeded"
        assert job["result"] == [1, {"a": None}]
        assert job["error"] is None
        assert job["crash_count"] == 0
        assert ISO.fullmatch(job["enqueued_at"])
        [attempt] = job["attempts"]
        assert attempt.keys() >= ATTEMPT_FIELDS
        assert attempt["token"] == held.token
        assert attempt["worker"] == "w1"
        assert attempt["state"] == "succeeded"
        assert ISO.fullmatch(attempt["started_at"])
        assert ISO.fullmatch(attempt["ended_at"])
        text = shop.run("job", f"#{held.job_id}").out
        assert "succeeded" in text
        assert '[1, {"a": null}]' in text
        assert "\x1b" not in text
        printed = shop.run("logs", str(held.job_id))
        assert (printed.out, printed.err) == ("hello\n", "a warning\n")
        assert shop.run("logs", str(held.job_id), "--json").json == [
            {"token": held.token, "stdout": "hello\n", "stderr": "a warning"}
        ]

    def test_the_story_of_a_failure(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs()
        [held] = shop.claim(start=True)
        shop.fail(held, "no \x1b[31mcolour\x1b[0m\nfrom jobs")
        job = shop.run("job", str(held.job_id), "--json").json
        assert job["error"]["code"] == "TASK_FAILED"
        assert job["error"]["details"]["type"] == "ValueError"
        assert [event["kind"] for event in job["events"]] == ["failed"]
        text = shop.run("job", str(held.job_id)).out
        assert "TASK_FAILED  ValueError: no \\x1b[31mcolour" in text
        assert 'File "tasks.py", line 3' in text

    def test_filters(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(3)
        shop.jobs(1, task="crawl", queue="scrapes")
        held = shop.claim(limit=2, start=True)
        shop.succeed(held[0])
        shop.fail(held[1])

        def found(*arguments: str) -> list[int]:
            return [job["id"] for job in shop.run("jobs", "--json", *arguments).json]

        assert found() == [4, 3, 2, 1]
        assert found("--limit", "2") == [4, 3]
        assert found("--state", "pending") == [4, 3]
        assert found("--state", "failed,succeeded") == [2, 1]
        assert found("--state", "failed", "--state", "PENDING") == [4, 3, 2]
        assert found("--queue", "scrapes") == [4]
        assert found("--task", "add") == [3, 2, 1]
        assert found("--error", "task_failed") == [2]
        assert found("--older-than", "1h") == []
        assert found("--newer-than", "1h") == [4, 3, 2, 1]
        shop.claim()
        assert found("--worker", "ada", "--state", "claimed") == [3]
        lines = shop.run("jobs", "--state", "failed").out.splitlines()
        assert lines[0].split() == ["ID", "STATE", "TASK", "QUEUE", "ENQUEUED", "TOOK", "TRIES", "NOTE"]
        assert lines[1].split()[:4] == ["2", "failed", "add", "default"]
        assert "TASK_FAILED: ValueError: boom" in lines[1]

    def test_nothing_to_list_is_said_beside_the_data(self, shop: Cli) -> None:
        shop.run("migrate")
        said = shop.run("jobs")
        assert (said.code, said.out, said.err) == (0, "", f"No jobs match. Ledger: {shop.url}\n")
        assert shop.run("jobs", "--json").json == []

    def test_options_stand_before_or_behind(self, shop: Cli) -> None:
        other = f"sqlite:///{shop.folder}/other.db"
        assert shop.run("--url", other, "--json", "migrate").json["url"] == other
        assert shop.run("--json", "jobs", "--url", other).json == []
        assert shop.run("--url", "sqlite:///nowhere.db", "jobs", "--url", other, "--json").json == []
        assert shop.run("workers", "--url", other, "--json").json == []

    def test_settings_of_a_file_are_heard(self, shop: Cli) -> None:
        (shop.folder / "unstuck.toml").write_text('url = "sqlite:///from_file.db"\n')
        assert shop.run("migrate", UNSTUCK_URL="").code == 0
        assert (shop.folder / "from_file.db").exists()


class TestMoving:
    def test_cancel_by_filter(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(3)
        shop.jobs(2, queue="other")
        shop.claim(limit=1, start=True)
        assert "1 pending" not in shop.refused(2, "cancel", "1", "--queue", "default")
        refused = shop.refused(2, "cancel", "--queue", "default")
        assert "3 jobs (2 pending, 1 running)" in refused
        assert "--yes" in refused
        would = shop.run("cancel", "--queue", "default", "--dry-run", "--json").json
        assert {one["answer"] for one in would} == {"matched"}
        assert len(would) == 3
        done = shop.run("cancel", "--queue", "default", "--yes", "--json").json
        assert sorted(one["answer"] for one in done) == ["cancelled", "cancelled", "requested"]
        states = [job["state"] for job in shop.run("jobs", "--queue", "other", "--json").json]
        assert states == ["pending", "pending"]
        assert shop.run("cancel", "--task", "nothing", "--yes").err.startswith("No jobs match. Ledger: ")

    def test_cancel(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(3)
        running, done = shop.claim(limit=2, start=True)
        shop.succeed(done)
        numbers = [str(running.job_id), str(done.job_id), "3", "99", str(10**30)]
        said = shop.run("cancel", *numbers, "--json")
        assert said.code == 1
        assert {item["id"]: item["answer"] for item in json.loads(said.out)} == {
            running.job_id: "requested",
            done.job_id: "finished",
            3: "cancelled",
            99: "missing",
            10**30: "missing",
        }
        assert shop.run("job", "3", "--json").json["error"]["code"] == "CANCELLED"
        assert shop.run("job", str(running.job_id), "--json").json["cancel_requested"] is True

    def test_retry_by_number(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(2)
        failed, done = shop.claim(limit=2, start=True)
        shop.fail(failed)
        shop.succeed(done)
        said = shop.run("retry", str(failed.job_id))
        assert said.code == 0, said
        assert "queued again" in said.out
        job = shop.run("job", str(failed.job_id), "--json").json
        assert job["state"] == "pending"
        assert job["failures"] == 0
        assert [attempt["state"] for attempt in job["attempts"]] == ["failed"]
        assert shop.run("retry", str(done.job_id)).code == 1
        assert shop.run("retry", str(failed.job_id)).code == 1

    def test_retry_by_filter(self, shop: Cli) -> None:
        shop.worker()
        shop.jobs(3)
        for held in shop.claim(limit=2, start=True):
            shop.fail(held)
        shop.run("cancel", "3")
        assert shop.run("retry", "--task", "other").code == 0
        assert {item["answer"] for item in shop.run("retry", "--error", "TASK_FAILED", "--json").json} == {"queued"}
        # What somebody cancelled stays so, unless it is asked for by name.
        assert shop.run("job", "3", "--json").json["state"] == "cancelled"
        assert len(shop.run("retry", "--state", "cancelled", "--json").json) == 1

    def test_prune(self, either_shop: Cli) -> None:
        shop = either_shop
        shop.worker()
        shop.jobs(3)
        failed, done = shop.claim(limit=2, start=True)
        shop.fail(failed)
        shop.succeed(done)
        assert shop.run("prune", "--json").json == {"pruned": 0}
        assert shop.run("prune", "--older-than", "0s", "--state", "failed", "--json").json == {"pruned": 1}
        assert "Removed 1 finished job." in shop.run("prune", "--older-than", "0s").out
        assert [job["state"] for job in shop.run("jobs", "--json").json] == ["pending"]


def test_after_a_restore_every_token_is_void(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    shop.jobs(2)
    shop.claim()
    assert shop.run("migrate", "--after-restore", "--json").json["voided_workers"] == 1
    [worker] = shop.run("workers", "--json").json
    assert worker["state"] == "dead"
    assert [job["state"] for job in shop.run("jobs", "--json").json] == ["pending", "pending"]


@pytest.mark.usefixtures("untouched")
def test_migrate_twice_is_as_good_as_once(either_shop: Cli) -> None:
    first = either_shop.run("migrate", "--json").json
    assert first["applied"]
    assert first["voided_workers"] is None
    assert either_shop.run("migrate", "--json").json["applied"] == []


_PENDING = JobFilter(states=(JobState.PENDING,))
