"""On a terminal there are colours and human ages; in a pipe there are none."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

from tests.support.cli import COMMAND, Cli

from unstuck.cli.explain import QUOTE_INDENT

COLOUR = "\x1b["


def on_terminal(shop: Cli, *arguments: str, answer: str = "", columns: int = 120) -> tuple[int, str]:
    """Run a command on a terminal of its own; give its exit code and all that appeared."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in shop.environment().items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=shop.folder,
        env={**environment, "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        close_fds=True,
    )
    os.close(slave)
    seen = b""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        readable, _, _ = select.select([master], [], [], 1.0)
        if readable:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
            if answer and b"[y/N]" in seen:
                os.write(master, answer.encode())
                answer = ""
    os.close(master)
    return process.wait(30), seen.decode(errors="replace")


def test_lists_have_colours_and_fit_the_width(shop: Cli) -> None:
    shop.worker(name="ada")
    shop.jobs(2)
    [held] = shop.claim(start=True)
    shop.fail(held, "a very long story " * 50)
    for command in ("jobs", "workers", "queues"):
        code, seen = on_terminal(shop, command, columns=100)
        assert code == 0
        assert COLOUR in seen
        assert "●" in seen
        plain = [_without_colour(line) for line in seen.splitlines()]
        assert max(len(line.rstrip()) for line in plain) <= 100, plain
    code, seen = on_terminal(shop, "jobs")
    assert "just now" in seen or "s ago" in seen
    assert "…" in seen


def test_the_story_of_a_job(shop: Cli) -> None:
    shop.worker()
    shop.jobs()
    [held] = shop.claim(start=True)
    shop.fail(held, "no \x1b[2Jescape")
    code, seen = on_terminal(shop, "job", "1")
    assert code == 0
    assert "\x1b[2J" not in seen
    assert "\\x1b[2Jescape" in _without_colour(seen)
    assert "Job 1" in _without_colour(seen)


def test_why_fits_a_narrow_terminal_and_obeys_no_escapes(shop: Cli) -> None:
    shop.worker()
    shop.jobs()
    [held] = shop.claim(start=True)
    shop.fail(held, "no \x1b[2Jescape " * 20)
    code, seen = on_terminal(shop, "why", "1", columns=80)
    assert code == 0
    assert "\x1b[2J" not in seen
    plain = _without_colour(seen)
    # What was quoted stays as it was written, so that a path can be copied whole.
    told = [line.rstrip() for line in plain.splitlines() if not line.startswith(" " * QUOTE_INDENT)]
    assert max(map(len, told)) <= 80, plain
    assert "its code raised ValueError: no \\x1b[2Jescape" in " ".join(plain.split())
    assert "unstuck retry 1" in plain


def test_json_on_a_terminal_has_no_colour(shop: Cli) -> None:
    shop.worker()
    code, seen = on_terminal(shop, "workers", "--json")
    assert code == 0
    assert COLOUR not in seen


def test_enqueue_says_what_the_job_waits_for(shop: Cli) -> None:
    shop.worker()
    shop.run("pause", "default")
    code, seen = on_terminal(shop, "enqueue", "add", "1")
    assert code == 0
    assert "is stored" in _without_colour(seen)
    assert "Queue 'default' is paused" in _without_colour(seen)


def test_cancel_by_filter_asks_first(shop: Cli) -> None:
    shop.worker()
    shop.jobs(2)
    code, seen = on_terminal(shop, "cancel", "--queue", "default", answer="n\n")
    assert code == 1
    assert "Cancel 2 jobs (2 pending)?" in seen
    assert len(shop.run("jobs", "--state", "pending", "--json").json) == 2


def test_a_long_result_is_cut_on_a_terminal_and_whole_where_it_is_asked_for(shop: Cli) -> None:
    shop.worker()
    shop.jobs()
    [held] = shop.claim(start=True)
    shop.succeed(held, b'"' + b"x" * 100_000 + b'end"')
    code, seen = on_terminal(shop, "job", "1")
    assert code == 0
    assert len(seen) < 10_000
    assert "--full" in _without_colour(seen)
    code, seen = on_terminal(shop, "job", "1", "--full")
    assert "xend" in "".join(_without_colour(seen).split())
    assert "xend" in shop.run("job", "1").out


def test_purge_asks_first(shop: Cli) -> None:
    shop.worker()
    shop.jobs(2)
    code, seen = on_terminal(shop, "purge", "default", answer="n\n")
    assert code == 1
    assert "Cancel up to 2 pending jobs of queue 'default'?" in seen
    assert len(shop.run("jobs", "--state", "pending", "--json").json) == 2
    code, seen = on_terminal(shop, "purge", "default", answer="y\n")
    assert code == 0
    assert "Cancelled 2 pending jobs" in _without_colour(seen)


def _without_colour(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)
