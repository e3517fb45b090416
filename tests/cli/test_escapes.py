"""Nothing that a job, a worker or a client wrote is obeyed by the terminal of somebody who looks at it."""

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_terminal import on_terminal
from tests.support.builders import birth
from tests.support.cli import Cli

from unstuck import App, logs
from unstuck.cli.main import app as command_line
from unstuck.cli.main import main
from unstuck.ledger.contract.workers import NewWorker

pytestmark = pytest.mark.usefixtures("restored_logging")

EVIL = "A\x1b[2J\x1b]0;title\x07B\u202eC\u2066D\x9b31mE\x7fF\x08G\u200fH\u2028I\U000e0041J"
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

LOOKS = {
    "jobs": ["jobs"],
    "jobs of a task": ["jobs", "--task", "{evil}"],
    "job": ["job", "1"],
    "job that runs": ["job", "2"],
    "why": ["why", "1"],
    "why it waits": ["why", "3"],
    "logs": ["logs", "5"],
    "job with a result": ["job", "5"],
    "doctor": ["doctor"],
    "doctor of one": ["doctor", "3"],
    "workers": ["workers"],
    "workers of all times": ["workers", "--all"],
    "queues": ["queues"],
    "lines": ["lines"],
    "workflows": ["workflows"],
    "workflow": ["workflow", "6"],
    "quarantine": ["quarantine", "list"],
    "schedules": ["schedules"],
    "tokens": ["tokens"],
    "alerts": ["alerts"],
    "audit": ["audit"],
    "stale": ["stale"],
    "alive": ["alive"],
    "stack": ["stack", "3"],
    "an unknown worker": ["workers", "drain", "{evil}"],
    "an unknown queue": ["pause", "{evil}"],
    "an unknown task": ["enqueue", "{evil}"],
    "an unknown schedule": ["schedules", "pause", "{evil}"],
    "an unknown option": ["jobs", "--{evil}"],
    "an unknown command": ["{evil}"],
    "no number": ["job", "{evil}"],
    "no ledger": ["jobs", "--url", "sqlite:///{evil}.db"],
    "retry": ["retry", "4"],
    "cancel": ["cancel", "3"],
}
ELSEWHERE = {"popups", "signal", "prune", "migrate", "keygen", "resume", "purge", "demo"}
"""Commands that open a window, or print nothing but what they did or who we are."""
RUNNING = {"worker", "up", "reaper", "serve", "broker"}
"""Commands that run and only log."""


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        raw: Any = self.buffer
        return str(raw.getvalue().decode("utf-8", "replace"))


def on_screen(monkeypatch: pytest.MonkeyPatch, shop: Cli, *arguments: str) -> str:
    """Run a command in this process, with two terminals for its output."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("UNSTUCK_URL", shop.url)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(shop.folder)
    main([*arguments])
    return out.text + err.text


@pytest.fixture(scope="module")
def bad_shop(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A ledger in which every text that others write is evil."""
    folder = tmp_path_factory.mktemp("evil")
    shop = Cli(f"sqlite:///{folder}/jobs.db", folder)
    shop.worker("w1", "ada", queues=("default", "idle"))
    with shop.ledger() as ledger:
        birth = _birth(shop)
        ledger.workers.register(birth)
        ledger.admin.end_audit(ledger.admin.begin_audit(EVIL, "http", EVIL, EVIL), EVIL)
    shop.jobs(payload=json.dumps({"args": [EVIL]}).encode(), unique_key=EVIL, enqueued_by=EVIL)
    [held] = shop.claim(start=True)
    shop.fail(held, EVIL)
    shop.jobs(payload=json.dumps({"kwargs": {EVIL: EVIL}}).encode())
    [running] = shop.claim(start=True)
    assert running.job_id == 2
    shop.jobs(task=EVIL, queue=EVIL)
    shop.jobs(2)
    failing, printing = shop.claim(start=True, limit=2)
    assert (failing.job_id, printing.job_id) == (4, 5)
    shop.fail(failing, EVIL)
    shop.succeed(printing, json.dumps(EVIL).encode(), EVIL.encode() + b"\xff", EVIL.encode())
    app = App(shop.url)

    @app.task
    def add() -> None: ...

    flow = app.workflow("flow")
    flow.add(add)
    flow.start()
    app.close()
    _spoil(shop)
    return shop


def _birth(shop: Cli) -> NewWorker:
    return birth(
        "w2",
        name=EVIL,
        host=EVIL,
        pid=1,
        process_started=1.0,
        queues=(EVIL,),
        tasks=(),
        concurrency=1,
        version=EVIL,
        heartbeat_interval_s=5.0,
        suspect_after_s=30.0,
        running_stale_after_s=30.0,
        metadata={EVIL: EVIL},
        transport="http",
        rules=shop.settings.recovery.rules,
    )


def _spoil(shop: Cli) -> None:
    """Write what no door would accept straight into the file, as an enemy with access to it could."""
    import apsw

    connection = apsw.Connection(str(Path(shop.url.removeprefix("sqlite:///"))))
    connection.set_busy_timeout(5000)
    for table, column in (("unstuck_workflows", "name"), ("unstuck_workflow_nodes", "name")):
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if column in columns:
            connection.execute(f"UPDATE {table} SET {column} = ?", (EVIL,))
    connection.close()


@pytest.mark.parametrize("arguments", LOOKS.values(), ids=LOOKS)
def test_a_terminal_gets_nothing_that_it_would_obey(
    bad_shop: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    given = [argument.replace("{evil}", EVIL) for argument in arguments]
    for more in ([], ["--json"]):
        seen = COLOUR.sub("", on_screen(monkeypatch, bad_shop, *given, *more))
        assert not OBEYED.search(seen), repr(seen)


def test_every_command_that_shows_something_is_tried() -> None:
    known = {command.name or command.callback.__name__ for command in command_line.registered_commands}  # type: ignore[union-attr]
    known |= {group.name for group in command_line.registered_groups if group.name}
    tried = {arguments[0] for arguments in LOOKS.values()}
    assert known - ELSEWHERE - RUNNING <= tried


def test_only_one_module_writes_to_the_terminal() -> None:
    folder = Path(sys.modules["unstuck.cli"].__path__[0])
    direct = re.compile(r"std(out|err)\.(write|buffer)|\bprint\(|typer\.(echo|secho|confirm|prompt)|\.console\(\)")
    found = {path.name for path in folder.glob("*.py") if path.name != "output.py" and direct.search(path.read_text())}
    assert not found


def test_what_a_job_printed_is_whole_in_a_pipe_and_where_it_is_asked_for(bad_shop: Cli) -> None:
    import subprocess

    from tests.support.cli import COMMAND

    done = subprocess.run(
        [*COMMAND, "logs", "5"], cwd=bad_shop.folder, env=bad_shop.environment(), capture_output=True, check=True
    )
    assert done.stdout == EVIL.encode() + b"\xff\n"
    assert done.stderr == EVIL.encode() + b"\n"
    _, seen = on_terminal(bad_shop, "logs", "5", "--raw")
    assert "\x1b[2J" in seen
    _, seen = on_terminal(bad_shop, "logs", "5")
    assert not OBEYED.search(seen.replace("\r\n", "\n"))
    assert "A\\x1b[2J\\x1b]0;title\\x07B\\u202eC" in seen


def test_json_keeps_every_value(bad_shop: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on_screen(monkeypatch, bad_shop, "job", "1", "--json")
    assert EVIL in json.loads(seen)["error"]["message"]
    assert "\\u202e" in seen


@pytest.mark.parametrize("format", ["console", "json"])
def test_a_log_on_a_terminal_is_as_harmless(format: str) -> None:
    screen = Terminal()
    logs.setup("info", format, screen)
    log = logs.logger("unstuck.test")
    log.warning(EVIL, name_of=EVIL, several=[EVIL], deep={EVIL: EVIL})
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("It failed")
    logging.getLogger("other").warning("%s", EVIL)
    seen = COLOUR.sub("", screen.text)
    assert not OBEYED.search(seen), repr(seen)
    assert seen.count("It failed") == 1
    assert "ValueError: A" in seen
    if format == "json":
        assert json.loads(screen.text.splitlines()[0])["event"] == EVIL


def test_text_is_neutralised_once_and_readably() -> None:
    from unstuck.domain.terminal import harmless, harmless_json

    assert harmless("a\tb\nc é 😀 שלום") == "a\tb\nc é 😀 שלום"
    assert harmless("👩\u200d💻") == "👩\u200d💻"
    assert harmless("x\r\ny\rz") == "x\ny\\x0dz"
    assert harmless(harmless(EVIL)) == harmless(EVIL)
    assert harmless("\u202e\U000e0041\x9b") == "\\u202e\\U000e0041\\x9b"
    assert json.loads(harmless_json(json.dumps(EVIL, ensure_ascii=False))) == EVIL
