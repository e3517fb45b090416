"""Which ledger? Whoever finds nothing, or begins to work, says where."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.cli import COMMAND, Cli
from tests.support.fleet import wait_for

APP = """
from unstuck import App
app = App({url})

@app.task
def add(a, b=0):
    return a + b
"""

LISTS = {
    "jobs": ["jobs"],
    "jobs of a state": ["jobs", "--state", "failed"],
    "workers": ["workers"],
    "queues": ["queues"],
    "lines": ["lines"],
    "workflows": ["workflows"],
    "quarantine": ["quarantine", "list"],
    "schedules": ["schedules"],
    "tokens": ["tokens"],
    "audit": ["audit"],
    "stale": ["stale"],
    "retry": ["retry", "--state", "failed"],
}


@pytest.mark.parametrize("arguments", LISTS.values(), ids=LISTS)
def test_an_empty_list_names_the_ledger(shop: Cli, arguments: list[str]) -> None:
    shop.run("migrate")
    said = shop.run(*arguments)
    assert f"sqlite:///{shop.folder}/jobs.db" in said.err, said
    assert "sqlite" not in said.out


MISSED = [
    *(f"{command} 77" for command in ("job", "why", "logs", "doctor", "workflow", "stack", "cancel", "retry")),
    "signal 77 go",
    "workflows cancel 77",
    "enqueue nothing",
    *(f"{command} nowhere" for command in ("pause", "resume", "purge")),
    "workers drain nobody",
    "jobs --worker nobody",
    "schedules pause never",
    "tokens revoke none",
]


@pytest.mark.parametrize("line", MISSED)
def test_what_is_not_there_is_missed_in_a_ledger_with_a_name(shop: Cli, line: str) -> None:
    shop.run("migrate")
    said = shop.run(*line.split())
    assert said.code == 1, said
    assert said.err.count(f"Ledger: sqlite:///{shop.folder}/jobs.db") == 1, said


def test_the_doctor_and_the_probe_name_the_ledger_without_its_password(either_shop: Cli) -> None:
    url = either_shop.url.replace("://postgres@", "://postgres:sesame@")
    said = either_shop.run("doctor", UNSTUCK_URL=url)
    assert said.out.startswith("ledger  "), said
    shown = url.replace("sesame", "***")
    assert said.out.splitlines()[0] == f"ledger  {shown}"
    assert "sesame" not in said.out + said.err
    said = either_shop.run("alive", UNSTUCK_URL=url)
    assert f"Ledger: {shown}" in said.out
    elsewhere = either_shop.run("doctor", UNSTUCK_URL=f"sqlite:///{either_shop.folder}/none.db")
    assert "none.db" in elsewhere.out


def test_a_worker_names_its_ledger_and_the_one_that_was_overruled(shop: Cli) -> None:
    (shop.folder / "app.py").write_text(APP.format(url='"sqlite:///code.db"'))
    (shop.folder / "empty.py").write_text("from unstuck import App\napp = App()\n")
    log = _log_of_worker(shop, "app:app")
    started = next(line for line in log if line["event"] == "Worker started")
    assert started["ledger"] == f"sqlite:///{shop.folder}/code.db"
    overruled = next(line for line in log if "the code wins" in line["event"])
    assert overruled["level"] == "warning"
    assert f"UNSTUCK_URL names the ledger sqlite:///{shop.folder}/jobs.db" in overruled["event"]
    log = _log_of_worker(shop, "empty:app")
    assert not [line for line in log if "the code wins" in line["event"]]
    assert [line for line in log if "empty:app has no tasks" in line["event"] and line["level"] == "warning"]
    said = shop.run("jobs", "--app", "app:app")
    assert "the code wins" in said.err
    assert said.err.count("the code wins") == 1
    assert "code.db" in said.err.splitlines()[-1]
    assert "the code wins" not in shop.run("jobs", "--app", "app:app", "--url", "sqlite:///jobs.db").err


def test_an_enqueue_that_no_worker_takes_names_the_ledger(shop: Cli) -> None:
    (shop.folder / "app.py").write_text(APP.format(url=""))
    (shop.folder / "client.py").write_text(
        "from app import add\nprint(add.enqueue(1).warning)\n"
        "from unstuck import App, NoWorkers\nstrict = App(no_workers='error')\n"
        "try:\n    strict.task(print, name='add').enqueue(1)\nexcept NoWorkers as error:\n    print(error)\n"
    )
    said = _python(shop, "client.py")
    first, second = said.splitlines()
    assert first.endswith(f"until one comes (ledger: sqlite:///{shop.folder}/jobs.db)")
    assert second == f"{first}."
    said = shop.run("enqueue", "add", "1", "--app", "app:app")
    assert f"(ledger: sqlite:///{shop.folder}/jobs.db)" in said.err
    assert said.out == "3\n"
    said = shop.run("enqueue", "add", "1", "--app", "app:app", UNSTUCK_NO_WORKERS="error")
    assert (said.code, said.out) == (1, "4\n")
    assert f"(ledger: sqlite:///{shop.folder}/jobs.db)." in said.err
    assert shop.run("enqueue", "add", "1", "--app", "app:app", UNSTUCK_NO_WORKERS="ignore").err == ""


def _python(shop: Cli, file: str) -> str:
    done = subprocess.run(
        [COMMAND[0], file], cwd=shop.folder, env=shop.environment(), capture_output=True, text=True, check=True
    )
    return done.stdout


def _log_of_worker(shop: Cli, target: str) -> list[dict[str, str]]:
    path = Path(shop.folder / "worker.log")
    with path.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "worker", target, "--concurrency", "1", "--log-format", "json"],
            cwd=shop.folder,
            env=shop.environment(),
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            wait_for(lambda: "Worker started" in path.read_text() or process.poll() is not None, "a worker")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, path.read_text()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_command_warns_of_a_misspelt_variable(shop: Cli) -> None:
    shop.run("migrate")
    said = shop.run("jobs", UNSTUCK_HEARTBEAT_TIMOUT="2m")
    assert "Did you mean UNSTUCK_HEARTBEAT_TIMEOUT?" in said.err
