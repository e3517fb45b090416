"""A test that fails shows what its processes and its database server logged, and nothing of other tests."""

from pathlib import Path

from tests.support.inner_pytest import run_pytest

TESTS = """
import subprocess
import sys

import psycopg
import pytest
from tests.support import processes
from tests.support.postgres import start_postgres


@pytest.fixture(scope="module")
def server():
    with start_postgres() as server:
        yield server


def ask(server, words):
    with pytest.raises(psycopg.Error):
        server.execute(words)


def show(year, path):
    with path.open("wb") as file:
        # With another environment for its interpreter it is not forked, which would load all of ours first.
        assert processes.start("calendar", year, stdout=file, env={"PYTHONUTF8": "1"}).wait(30) == 0


def test_passes(server, tmp_path):
    show("7777", tmp_path / "out")
    ask(server, "select * from asked_before")


def test_fails(server, tmp_path):
    show("1234", tmp_path / "out")
    with (tmp_path / "worker.log").open("wb") as file:
        subprocess.run([sys.executable, "-c", "print('first' 'word', 'x' * 100_000, 'last' 'word')"], stdout=file)
    ask(server, "select * from asked_now")
    pytest.fail("on purpose")
"""


def test_a_failed_test_shows_its_logs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = run_pytest(tmp_path, "-p", "tests.support.process_logs", "-p", "no:cacheprovider")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "September" in done.stdout, "a process that was started"
    assert 'relation "asked_now" does not exist' in done.stdout, "the server"
    assert "lastword" in done.stdout, "a process that was started in another way"
    assert "firstword" not in done.stdout, "only the end of it"
    assert "7777" not in done.stdout, "a process of another test"
    assert "asked_before" not in done.stdout, "the server, in another test"
