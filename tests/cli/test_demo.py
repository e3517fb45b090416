"""The demo kills and loses nothing, tells it in lines that can be read by programs, and leaves nothing behind."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import psutil
import pytest
from tests.support.cli import COMMAND, Cli
from tests.support.signals import OwnProcess

from unstuck.demo.score import Audit, audit
from unstuck.ledger.contract.workers import AttemptRef

LINE = re.compile(r" *(?P<at>\d+\.\d\d) (?P<word>phase|started|killed|settled|status) +(?P<sentence>\S.*)")
NUMBER = re.compile(r"  (?P<label>[a-z][a-z -]*[a-z]) +(?P<number>[\d,]+)")
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")
PATIENCE_S = 120.0


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}
    # A ledger that stands in the environment by chance is none of the demo's business.
    return {**kept, "UNSTUCK_URL": f"sqlite:///{folder}/precious.db", "TMPDIR": str(folder), "TERM": "xterm-256color"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "demo", "--seconds", "6", "--workers", "3", "--kill-every", "1", *arguments],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_short_run_in_a_pipe(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said.returncode == 0, said
    assert said.stderr == ""
    assert not re.search(r"[^\n\x20-\uffff]|\x7f", said.stdout), "control characters in a pipe"
    told, _, summed_up = said.stdout.partition("\n\n")
    lines = [LINE.fullmatch(line) for line in told.splitlines()]
    assert all(lines), told
    words = [line["word"] for line in lines if line]
    assert words.count("killed") == words.count("settled") >= 2
    numbers = {found["label"]: int(found["number"].replace(",", "")) for found in NUMBER.finditer(summed_up)}
    assert numbers["lost"] == 0
    assert numbers["finished twice"] == 0
    assert numbers["enqueued"] == numbers["succeeded"] + numbers["failed by design"] > 50
    assert numbers["workers"] >= 1
    assert numbers["runners"] >= 1
    assert numbers["workers"] + numbers["runners"] == words.count("killed")
    assert list(tmp_path.iterdir()) == [], "the temporary ledger is gone, and the one in the environment was not made"


def test_the_summary_as_json_on_postgresql(tmp_path: Path, pg_url: str) -> None:
    said = run(tmp_path, "--json", "--url", pg_url)
    assert said.returncode == 0, said
    summary = json.loads(said.stdout)
    assert summary["ok"] is True
    assert (summary["lost"], summary["finished_twice"], summary["unexpected_exits"]) == (0, 0, [])
    assert summary["deaths"]["workers"] >= 1
    assert summary["deaths"]["runners"] >= 1
    assert {kill["detector"] for kill in summary["kills"]} <= {"runner", "neighbour"}
    assert summary["detection_ms"]["all"]["median"] <= summary["detection_ms"]["all"]["worst"] < 10_000
    assert all(LINE.fullmatch(line) for line in said.stderr.splitlines()), said.stderr
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_it_draws_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "demo", "--seconds", "600", "--workers", "2", "--kill-every", "1"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        seen = _read_until(master, "by neighbour")
        if "runner of w" not in seen:
            # Who is killed first is left to chance.
            seen += _read_until(master, "runner of w")
        family = OwnProcess(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.send_signal(signal.SIGINT)
        rest = _read_until(master, "")
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)
    shown = ESCAPE.sub("", seen)
    assert all(word in shown for word in ("unstuck demo", "heart", "♥", "last deaths", "LOST 0", "runner of w"))
    assert "its workers and its files are gone" in rest
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_ledger_is_told_in_a_sentence(tmp_path: Path) -> None:
    shop = Cli(f"sqlite:///{tmp_path}/jobs.db", tmp_path)
    assert "is not a ledger" in shop.refused(1, "demo", "--url", "mysql://nowhere/db")
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear aunt, this is long enough to be no database. " * 100)
    assert "is not a SQLite database" in shop.refused(1, "demo", "--url", f"sqlite:///{letter}")


def _read_until(master: int, word: str) -> str:
    """Read what appears on the terminal until the word is there; an empty word: until the end."""
    seen = b""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not (word and word.encode() in seen):
        if select.select([master], [], [], 1.0)[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
    return seen.decode(errors="replace")


class Witness:
    """One job that was run in order, and the record beside the ledger."""

    def __init__(self, shop: Cli, folder: Path) -> None:
        self.shop = shop
        self.record = folder / "record"
        self.lines: list[str] = []
        shop.worker()

    def running(self, task: str = "add") -> AttemptRef:
        self.shop.jobs(task=task)
        [held] = self.shop.claim(start=True)
        return held

    def wrote(self, word: str, job_id: int, mark: str = "aa", at: float | None = None) -> None:
        self.lines.append(f"{word} {job_id} {mark} {time.time() if at is None else at:.6f}")

    def audit(self, *job_ids: int) -> Audit:
        self.record.write_text("".join(f"{line}\n" for line in self.lines))
        with self.shop.ledger() as ledger:
            return audit(ledger, job_ids, self.record)


@pytest.fixture
def witness(shop: Cli, tmp_path: Path) -> Witness:
    return Witness(shop, tmp_path)


def succeeded(witness: Witness) -> int:
    held = witness.running()
    witness.wrote("begun", held.job_id)
    witness.wrote("ended", held.job_id)
    witness.shop.succeed(held, b'"aa"')
    return held.job_id


def test_a_job_in_order_is_a_success(witness: Witness) -> None:
    found = witness.audit(succeeded(witness))
    assert (found.succeeded, found.lost, found.twice) == (1, {}, {})


def test_a_job_that_vanished_is_lost(witness: Witness) -> None:
    found = witness.audit(succeeded(witness), 4711)
    assert found.lost == {4711: "is not in the ledger"}


def test_a_job_that_never_ended_is_lost(witness: Witness) -> None:
    [waiting] = witness.shop.jobs()
    assert witness.audit(waiting).lost == {waiting: "add is still pending"}


def test_a_success_that_never_ran_to_its_end_is_lost(witness: Witness) -> None:
    held = witness.running()
    witness.wrote("begun", held.job_id)
    witness.shop.succeed(held, b'"aa"')
    assert "never ran to its end" in witness.audit(held.job_id).lost[held.job_id]


def test_a_failure_that_no_rule_allows_is_lost(witness: Witness) -> None:
    held = witness.running()
    witness.shop.fail(held)
    assert "its rules do not allow" in witness.audit(held.job_id).lost[held.job_id]


def test_a_job_begun_again_after_its_success_is_finished_twice(witness: Witness) -> None:
    job_id = succeeded(witness)
    witness.wrote("begun", job_id, "bb", time.time() + 60)
    assert witness.audit(job_id).twice == {job_id: "add was begun again after its success"}


def test_two_ends_without_a_crash_are_finished_twice(witness: Witness) -> None:
    job_id = succeeded(witness)
    began = time.time() - 60
    witness.wrote("begun", job_id, "bb", began)
    witness.wrote("ended", job_id, "bb", began + 1)
    assert "with 0 crashes to explain it" in witness.audit(job_id).twice[job_id]
