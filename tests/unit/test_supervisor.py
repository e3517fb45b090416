"""What the supervisor, the herald and the watchdog decide and say, without a fleet."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for

from unstuck import host
from unstuck.config import Recovery, Settings
from unstuck.ledger.open import ready_ledger
from unstuck.maintenance.loop import Loop
from unstuck.recovery.reap import Reaper
from unstuck.worker.exit_status import OOM, WATCHDOG_EXIT, Exit, exit_of
from unstuck.worker.sd_notify import SdListener, SdNotifier, take_sd_notifier
from unstuck.worker.supervised import BRAKE_AT, RestartBackoff, SupervisedWorker, summary
from unstuck.worker.watchdog import CALL_LIMITS, LATE_S, Jury, ProgressClock, Watched

# How a worker ended -------------------------------------------------------------------------------


def test_a_death_is_told_with_its_signal_age_memory_and_time() -> None:
    end = Exit(signal.SIGKILL, 12.31, 85_200_000, 1.2)
    assert str(end) == "killed by SIGKILL (signal 9) after 12.3s; peak memory 85 MB, CPU 1.2s"
    assert end.code == -9


def test_a_worker_killed_while_memory_ran_out_probably_died_of_it() -> None:
    said = str(Exit(signal.SIGKILL, 3.0, 900_000_000, 2.0, OOM))
    assert "killed by SIGKILL (signal 9) after 3s: probably the kernel, for want of memory" in said
    assert "others share that count" in said


def test_the_code_of_the_watchdog_is_explained() -> None:
    assert "after 60s: its own watchdog found it alive but doing nothing;" in str(Exit(WATCHDOG_EXIT << 8, 60.0))


def test_the_kernel_is_asked_what_the_dead_had_used() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "b = bytearray(60_000_000); raise SystemExit(4)"], {})
    _, status, usage = os.wait4(pid, 0)
    end = exit_of(status, usage, 1.0)
    assert end.code == 4
    assert end.max_rss_bytes > 50_000_000
    assert end.cpu_s > 0


# The herald ---------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """What systemd is to a service: a datagram socket, in the file system or without a file."""
    address = str(tmp_path / "notify") if request.param == "file" else f"@unstuck-test-{os.getpid()}-{id(request)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address if request.param == "file" else "\0" + address[1:])
        ear.settimeout(5)
        yield ear, address


def test_the_herald_speaks_as_systemd_wants_and_takes_the_variables_away(listener: tuple[socket.socket, str]) -> None:
    ear, address = listener
    given = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "KEPT": "1"}
    herald = take_sd_notifier(given)
    assert given == {"KEPT": "1"}
    assert herald.watchdog_s == 3.0
    herald.ready("1 of 1 workers\nalive")
    herald.ready("again")
    herald.alive()
    herald.alive()
    herald.status("1 of 1 workers alive")
    herald.stopping("bye")
    heard = [ear.recv(4096).decode() for _ in range(3)]
    # Once each: ready and alive are not repeated, and a status that is no news is none.
    assert heard == ["READY=1\nSTATUS=1 of 1 workers alive", "WATCHDOG=1", "STOPPING=1\nSTATUS=bye"]


def test_a_watchdog_of_somebody_else_is_not_ours() -> None:
    assert take_sd_notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert take_sd_notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "nonsense"}).watchdog_s is None


def test_a_herald_whom_nobody_hears_disturbs_nobody(tmp_path: Path) -> None:
    for herald in (SdNotifier(), take_sd_notifier({}), SdNotifier(str(tmp_path / "nobody"), 1.0)):
        herald.ready()
        herald.alive()
        herald.stopping()


def test_reports_know_who_speaks() -> None:
    reports = SdListener()
    try:
        herald = take_sd_notifier(reports.environment())
        assert herald.watchdog_s is not None
        herald.ready("here")
        assert list(reports.take()) == [(os.getpid(), frozenset({"READY=1", "STATUS=here"}))]
        assert list(reports.take()) == []
    finally:
        reports.close()


# The fleet in one line ----------------------------------------------------------------------------


def test_a_fleet_is_told_in_one_line() -> None:
    places = [SupervisedWorker(number, RestartBackoff(), pid=100 + number, ready_s=1.0) for number in range(4)]
    assert summary(places, 10.0) == "4 of 4 workers alive"
    places[0].pid, places[0].replacing.at_s = 0, 18.0
    assert summary(places, 10.0) == "3 of 4 workers alive; 1 restarting in 8s"
    places[0].replacing.deaths = BRAKE_AT
    assert summary(places, 10.0) == "3 of 4 workers alive; 1 restarting in 8s (dying again and again)"
    places[1].ready_s = None
    places[2].pid, places[2].retired = 0, True
    assert "1 of 4 workers alive; 1 starting; 1 restarting" in summary(places, 10.0)
    assert summary(places, 10.0).endswith("1 stopped by an operator")
    assert summary(places, 10.0, stopping=True) == "stopping: 2 of 4 workers still draining"


def test_a_slow_import_that_fails_is_no_life() -> None:
    place = SupervisedWorker(1, RestartBackoff(), pid=1, born_s=0.0)
    assert place.worked_s(60.0) == 0.0
    place.ready_s = 40.0
    assert place.worked_s(60.0) == 20.0


# The watchdog's jury ------------------------------------------------------------------------------

LIMIT_S = 10.0


class Scene:
    """A worker whose loops move as the test says; a second passes with each look."""

    def __init__(self) -> None:
        self.floor, self.wheel, self.heartbeat = ProgressClock(), ProgressClock(), ProgressClock()
        self.heartbeat.busy = True
        self.wanted = self.importing = False
        self.watched = Watched(self.floor, self.wheel, self.heartbeat, lambda: self.wanted, lambda: self.importing)
        self.jury = Jury(LIMIT_S, poll_s=1.0)

    def look(self, seconds: int, *moving: ProgressClock, every_s: float = 1.0) -> str | None:
        for _ in range(seconds):
            for sign in moving:
                sign.moved()
            if evidence := self.jury.look(self.watched, every_s):
                return evidence
        return None


def test_a_worker_that_goes_round_is_left_alone() -> None:
    scene = Scene()
    scene.wanted = True
    assert scene.look(1_000, scene.floor, scene.wheel, scene.heartbeat) is None


def test_a_busy_worker_without_a_turn_to_do_is_left_alone() -> None:
    scene = Scene()
    assert scene.look(1_000, scene.floor, scene.heartbeat) is None


def test_a_floor_that_stands_still_is_a_death() -> None:
    scene = Scene()
    evidence = scene.look(20, scene.wheel, scene.heartbeat)
    assert evidence == "alive but doing nothing: its floor has not gone round for 10s"


def test_the_import_of_the_app_may_take_its_time() -> None:
    scene = Scene()
    scene.importing = True
    assert scene.look(1_000, scene.heartbeat) is None


def test_a_wheel_that_is_wanted_and_does_not_turn_is_a_death() -> None:
    scene = Scene()
    scene.wanted = True
    evidence = scene.look(30, scene.floor, scene.heartbeat)
    assert evidence is not None
    assert "its wheel was wanted and has not turned" in evidence


def test_a_wheel_that_waits_for_the_ledger_is_given_much_longer() -> None:
    scene = Scene()
    scene.wanted = scene.wheel.busy = True
    assert scene.look(int(LIMIT_S * CALL_LIMITS), scene.floor, scene.heartbeat) is None
    evidence = scene.look(2, scene.floor, scene.heartbeat)
    assert evidence is not None
    assert "its turn hangs in the ledger" in evidence


def test_a_beat_that_hangs_is_seen() -> None:
    scene = Scene()
    evidence = scene.look(int(LIMIT_S * CALL_LIMITS) + 2, scene.floor, scene.wheel)
    assert evidence is not None
    assert "its heartbeat hangs in the ledger" in evidence


def test_whoever_was_asleep_himself_accuses_nobody() -> None:
    scene = Scene()
    scene.wanted = True
    assert scene.look(9) is None
    # The machine slept, or the process was stopped: everybody stood still, the watchdog too.
    assert scene.look(1, every_s=LATE_S + 3_600.0) is None
    assert scene.look(9) is None
    assert scene.look(1_000, every_s=LATE_S + 0.1) is None


# The supervisor's own reaper ----------------------------------------------------------------------


def test_a_reaper_that_does_not_walk_is_seen(tmp_path: Path) -> None:
    ledger = ready_ledger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    reaper_loop = Loop(Reaper(ledger, Recovery(), by="supervisor"))
    try:
        assert not reaper_loop.turns(host.boottime_s(), 300.0), "he has not even begun"
        reaper_loop.start()
        wait_for(lambda: reaper_loop.turns(host.boottime_s(), 300.0), "his rounds")
        assert not reaper_loop.turns(host.boottime_s() + 400.0, 300.0), "he has hung for longer than the limit"
        assert not reaper_loop.cut_off
    finally:
        reaper_loop.stop()
        reaper_loop.join(10)
        ledger.close()
    assert not reaper_loop.turns(host.boottime_s(), 300.0)
