"""What runs for long: a worker, supervised workers, the reaper; started, asked and stopped like a user would."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.cli import COMMAND, Cli
from tests.support.fleet import wait_for
from tests.support.signals import send_signal
from tests.support.webhook_receiver import SECRET, receiving

APP = """
import os, time
from unstuck import App
app = App()
print("noise at import")

@app.task
def add(a, b=0):
    print("adding", a, b)
    return a + b

@app.task
def sleep(seconds):
    time.sleep(seconds)
"""


@contextmanager
def running(shop: Cli, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; whatever happens, it is gone afterwards."""
    log = (shop.folder / "serving.log").open("wb")
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=shop.folder,
        env=shop.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
        log.close()


def living(shop: Cli) -> list[dict[str, object]]:
    if not (shop.folder / "jobs.db").exists():
        return []
    said = shop.run("workers", "--json")
    return [worker for worker in json.loads(said.out or "[]") if worker["state"] == "active"]


def make_app(shop: Cli) -> None:
    (shop.folder / "app.py").write_text(APP)


def test_a_worker_makes_the_ledger_works_and_leaves_in_order(shop: Cli) -> None:
    make_app(shop)
    with running(shop, "worker", "app:app", "--name", "ada", "--concurrency", "2", "--log-format", "json") as process:
        wait_for(lambda: living(shop), "a living worker")
        [worker] = living(shop)
        assert worker["name"] == "ada"
        assert worker["pid"] == process.pid
        assert shop.run("enqueue", "add", "1", "2", "--wait", "--timeout", "30s").out == "3\n"
        assert shop.run("logs", "1").out == "adding 1 2\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    log = (shop.folder / "serving.log").read_text()
    assert "Received shutdown signal, gracefully exiting..." in log
    for line in log.splitlines():
        assert line == "noise at import" or json.loads(line)["event"], line
    [worker] = shop.run("workers", "--json").json
    assert worker["state"] == "stopped"
    assert (shop.folder / "jobs.db").stat().st_mode & 0o777 == 0o600


WANDERING = """
import os
from unstuck import App
app = App("sqlite:///code.db")

@app.task
def add(a, b=0):
    return a + b

@app.task
def wander(folder):
    os.chdir(folder)
    return add.enqueue(1, 2).id

@app.task
async def awander(folder):
    os.chdir(folder)
    return (await add.enqueue_async(1, 2)).id
"""


def test_a_job_that_goes_elsewhere_enqueues_into_the_ledger_of_its_worker(shop: Cli) -> None:
    (shop.folder / "app.py").write_text(WANDERING)
    elsewhere = shop.folder / "elsewhere"
    elsewhere.mkdir()
    # Relative, and not the one that the code names: runners must hear of it, and understand it as the worker did.
    given = ("--url", "sqlite:///given.db")
    with running(shop, "worker", "app:app", "--concurrency", "2", *given):
        for number, task in ((1, "wander"), (3, "awander")):
            wait_for(lambda: shop.run("workers", "--json", *given).out.count('"active"'), "a living worker")
            said = shop.run("enqueue", task, json.dumps(str(elsewhere)), "--wait", "--timeout", "30s", *given)
            assert said.out == f"{number + 1}\n", said
        for number in (2, 4):
            wait_for(lambda n=number: shop.run("job", str(n), "--json", *given).json["state"] == "succeeded", "a job")
    assert not list(elsewhere.iterdir())
    assert not (shop.folder / "code.db").exists()
    assert not (shop.folder / "jobs.db").exists()


def test_a_running_job_is_cancelled_at_once(shop: Cli) -> None:
    make_app(shop)
    with running(shop, "worker", "app:app", "--concurrency", "1"):
        wait_for(lambda: living(shop), "a living worker")
        shop.run("enqueue", "sleep", "100")
        wait_for(lambda: shop.run("jobs", "--state", "running", "--json").json, "a running job")
        assert "its worker was told" in shop.run("cancel", "1").out
        wait_for(lambda: shop.run("job", "1", "--json").json["state"] == "cancelled", "cancelled")


def test_a_worker_is_stopped_from_afar(shop: Cli) -> None:
    make_app(shop)
    with running(shop, "worker", "app:app", "--name", "ada", "--concurrency", "1") as process:
        wait_for(lambda: living(shop), "a living worker")
        assert shop.run("workers", "stop", "ada").code == 0
        assert process.wait(40) == 0


def test_up_replaces_whoever_dies(shop: Cli) -> None:
    make_app(shop)
    with running(shop, "up", "app:app", "--workers", "2", "--concurrency", "1") as process:
        wait_for(lambda: len(living(shop)) == 2, "two living workers")
        victim = living(shop)[0]
        send_signal(int(str(victim["pid"])), signal.SIGKILL)
        wait_for(lambda: len([w for w in living(shop) if w["id"] != victim["id"]]) == 2, "a replacement")
        dead = [worker for worker in shop.run("workers", "--json").json if worker["id"] == victim["id"]]
        assert dead[0]["state"] == "dead"
        assert dead[0]["verdict"]["detector"] in ("supervisor", "neighbour")
        assert shop.run("enqueue", "add", "20", "22", "--wait", "--timeout", "30s").out == "42\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert living(shop) == []
    assert f"The supervisor uses the ledger {shop.url}" in (shop.folder / "serving.log").read_text()


def test_the_reaper_daemon_settles_and_leaves_in_order(shop: Cli) -> None:
    silent = shop.with_settings(heartbeat_interval=0.2, heartbeat_timeout=0.5)
    silent.worker()
    silent.jobs()
    silent.claim(start=True)
    with running(shop, "reaper") as process:
        wait_for(lambda: shop.run("job", "1", "--json").json["state"] == "failed", "settled")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    log = (shop.folder / "serving.log").read_text()
    assert "Dead worker detected: w1" in log
    assert f"The reaper uses the ledger {shop.url}" in log


def test_a_worker_without_its_app_says_so(shop: Cli) -> None:
    for command in ("worker", "up"):
        assert "There is no module 'nothing_here'" in shop.refused(1, command, "nothing_here:app")
    make_app(shop)
    said = shop.run("worker", "app:app", "--queues", "nosuch")
    assert said.code == 1
    assert "No task of this app uses the queue 'nosuch'" in said.err
    said = shop.run("worker", "app:app", "--no-migrate")
    assert said.code == 1
    assert "unstuck migrate" in said.err
    assert not (shop.folder / "jobs.db").exists()


def test_ctrl_c_ends_a_wait_with_130(shop: Cli) -> None:
    shop.worker()
    with running(shop, "enqueue", "add", "1", "--wait") as process:
        wait_for(lambda: shop.run("jobs", "--json").json, "the job is stored")
        # The child sets no handler of its own; the interpreter turns SIGINT into KeyboardInterrupt.
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert "Traceback" not in (shop.folder / "serving.log").read_text()


def test_what_an_app_prints_does_not_mix_with_json(shop: Cli) -> None:
    make_app(shop)
    said = shop.run("enqueue", "add", "1", "--app", "app:app", "--json")
    assert said.json["task"] == "add"
    assert "noise at import" in said.err


SECRETS = {"UNSTUCK_ALERTS_WEBHOOK_SECRET": SECRET}


def test_a_trial_says_of_each_target_whether_it_arrived(shop: Cli) -> None:
    with receiving() as good, receiving() as bad:
        bad.status = 410
        said = shop.run("alerts", "test", UNSTUCK_ALERTS_TARGETS=f"{good.url} {bad.url}", **SECRETS)
        assert said.code == 1
        first, second = said.out.splitlines()[1:]
        assert first.split() == [f"http://127.0.0.1:{good.port}/…", "arrived", "-"]
        assert f"http://127.0.0.1:{bad.port}/…" in second
        assert second.split()[1:] == ["failed", "it", "answered", "410"]
        assert "token-in-the-path" not in said.out + said.err
        [post] = good.posts
        assert post.is_signed()
        assert post.body["trial"] is True
        said = shop.run("alerts", "test", "--json", UNSTUCK_ALERTS_TARGETS=good.url, **SECRETS)
        assert said.json == [{"target": f"http://127.0.0.1:{good.port}/…", "arrived": True, "why": ""}]


def test_targets_are_listed_before_anybody_was_told(shop: Cli) -> None:
    shop.run("migrate")
    assert "No alert target is set" in shop.run("alerts", "list").err
    said = shop.run("alerts", UNSTUCK_ALERTS_TARGETS="https://h.example/T0KEN", **SECRETS)
    assert "no sender has met it yet" in said.out
    assert "T0KEN" not in said.out


@pytest.mark.parametrize("command", ["test", "run"])
def test_what_can_never_be_sent_is_said_in_one_sentence(shop: Cli, command: str) -> None:
    shop.run("migrate")
    assert "Set alerts.targets" in shop.refused(1, "alerts", command)
    said = shop.refused(1, "alerts", command, UNSTUCK_ALERTS_TARGETS="https://h.example/T0KEN")
    assert "needs a secret" in said
    assert "T0KEN" not in said


def test_a_service_that_apprise_does_not_know_is_named_without_its_token(shop: Cli) -> None:
    shop.run("migrate")
    said = shop.refused(1, "alerts", "run", UNSTUCK_ALERTS_TARGETS="nosuch://b0ttoken/77")
    assert "Apprise does not understand the alert target nosuch://…" in said
    assert "b0ttoken" not in said
