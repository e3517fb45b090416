"""A test that fails does not fail another."""

from pathlib import Path

from tests.support.inner_pytest import run_pytest

TESTS = """
import socket


def test_fails():
    left_open = socket.socket()
    raise AssertionError("on purpose")


def test_passes():
    pass
"""


def test_what_a_failed_test_left_open_counts_against_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = run_pytest(tmp_path, "-W", "error", "-p", "tests.conftest", "-p", "no:cacheprovider")
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_it.py::test_fails" in done.stdout
    assert "ResourceWarning: unclosed <socket" in done.stdout
