"""A run that is killed leaves nothing behind: no process, no memory, no folder of a database, no mount, no network."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.run_guard import MARK, SERVER_HOMES, note_memory_of
from tests.support.signals import OwnProcess

ROOT = Path(__file__).resolve().parents[2]
BEGIN_S = 120.0
GONE_S = 30.0
CUT = "tests/crash/test_cut_networks.py::test_packets_vanish_for_longer_than_the_default_lease"
RUNS = [
    pytest.param("other_hosts", ["tests/crash/test_frozen_workers.py", "-k", "postgresql"], id="workers on PostgreSQL"),
    pytest.param("networks", [CUT, "-m", "long"], id="networks", marks=pytest.mark.long),
    pytest.param("own_mounts", ["tests/chaos", "-k", "full_disk"], id="mounts", marks=pytest.mark.long),
]


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes of a run and of those inside it, with what they are."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if f"\0{MARK}={mark}.".encode() in b"\0" + Path(f"/proc/{name}/environ").read_bytes():
                    found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:
                pass
    return found


def folders_of(mark: str) -> list[Path]:
    return [path for home in SERVER_HOMES for path in Path(home).glob(f"*{mark}.*")]


def servers_in(folders: list[Path]) -> set[str]:
    return {path.read_text().split()[0] for folder in folders for path in folder.glob("data/postmaster.pid")}


def segments_of(servers: set[str]) -> list[str]:
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return [f"segment {fields[1]}" for fields in lines if fields[4] in servers]


def outside() -> set[str]:
    """Return mounts, network devices and named namespaces that are visible to the whole machine."""
    mounts = re.findall(r"^\S+ (\S+)", Path("/proc/1/mounts").read_text(), re.MULTILINE)
    names = Path("/run/netns")
    return {*mounts, *os.listdir("/sys/class/net"), *(os.listdir(names) if names.is_dir() else ())}


@pytest.mark.parametrize(("needs", "words"), RUNS)
def test_a_run_that_is_killed_leaves_nothing_behind(
    needs: str, words: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(needs)
    mark = os.environ[MARK]
    before = outside()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # In one process: those of xdist notice the end of their controller, and clean up behind them.
    options = ["-p", "no:schemathesis", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # In the middle: a worker is at work, with its page in memory, and its server runs.
        def in_the_middle() -> set[Path]:
            assert run.poll() is None, "the run ended before it was killed"
            pages = {page for pid in processes_of(mark) for page in note_memory_of(pid)}
            return pages if servers_in(folders_of(mark)) else set()

        pages = wait_for(in_the_middle, "the run to be in the middle of its tests", BEGIN_S, every_s=0.5)
        folders = folders_of(mark)
        servers = servers_in(folders)
        held = [OwnProcess(pid) for pid in processes_of(mark) if pid != run.pid]
        run.kill()
        run.wait()

        def left() -> list[object]:
            return [
                *processes_of(mark).items(),
                *folders_of(mark),
                *(page for page in pages if page.exists()),
                *segments_of(servers),
                *(process for process in held if not process.ended),
            ]

        with suppress(AssertionError):
            wait_for(lambda: not left(), "nothing to be left", GONE_S, every_s=0.5)
        assert left() == []
        # Other programs of this machine come and go; what we make is named after the run, or as in `hosts`.
        made = {name for name in outside() - before if mark in name or name.startswith(("near", "far", "unstuck"))}
        assert not made
    finally:
        for pid in processes_of(mark):
            try:
                OwnProcess(pid).send_signal(signal.SIGKILL)
            except OSError:
                pass
        run.wait()
