"""The desktop application on a screen that nobody sees: real workers are killed, and people are told."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.desktop.screen import QSystemTrayIcon, Screen
from tests.support.cli import COMMAND, Cli
from tests.support.fleet import ROOT, Fleet
from tests.support.postgres import PgServer

from unstuck.desktop.app import DesktopApp
from unstuck.desktop.popups import MAX_MESSAGE_CHARS, CrashedCalls, DeadWorkers, UnservedCalls, UnservedQueues

PATIENT_S = 60.0


@pytest.fixture
def fleet(either_shop: Cli) -> Iterator[Fleet]:
    fleet = Fleet(either_shop.url, either_shop.folder)
    yield fleet
    fleet.close()


def at_desk(screen: Screen, fleet: Fleet, popups: bool = True) -> DesktopApp:
    """Sit down, and wait until nothing is missed any more."""
    desk = DesktopApp(fleet.app.settings, popups=popups)
    began: list[bool] = []
    desk.following_began.connect(lambda: began.append(True))
    screen.wait_for(lambda: began, "the ledger followed")
    return desk


def test_the_death_of_a_worker_pops_up_with_what_became_of_its_job(screen: Screen, fleet: Fleet) -> None:
    victim = fleet.start("--concurrency", "1", "--name", "ada")
    fleet.start("--concurrency", "1", "--queues", "other")
    fleet.begin("nap_again", 300)
    desk = at_desk(screen, fleet)
    try:
        assert screen.dialogs() == [], "what happened before pops up no more"
        dead_id = victim.id
        victim.kill()
        screen.wait_for(lambda: desk.death_popup.box, "a popup")
        box = desk.death_popup.box
        assert box is not None
        screen.wait_for(lambda: "1 queued again" in box.text(), "what became of its job")
        assert box.windowTitle() == "Worker Crashed"
        assert f"Worker ada ({dead_id}) has died." in box.text()
    finally:
        desk.close()


def test_a_queue_that_nobody_serves_pops_up_once(screen: Screen, fleet: Fleet) -> None:
    desk = at_desk(screen, fleet)
    try:
        fleet.task("nap").options(queue="other").enqueue(0)
        screen.wait_for(lambda: desk.unserved_popup.box, "a popup")
        [box] = screen.dialogs()
        assert box.windowTitle() == "No Workers Available"
        assert "Please start worker servers" in box.text()
    finally:
        desk.close()


def test_an_outage_is_said_and_what_happened_after_it_is_told(
    screen: Screen, pg_server: PgServer, pg_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QSystemTrayIcon, "isSystemTrayAvailable", lambda: True)
    fleet = Fleet(pg_url, tmp_path)
    desk = at_desk(screen, fleet)
    assert desk.tray is not None
    icon, state = desk.tray.icon, desk.tray.menu.actions()[0]
    try:
        screen.wait_for(lambda: state.text().startswith("Following"), "the ledger followed")
        pg_server.stop()
        try:
            screen.wait_for(lambda: not state.text().startswith("Following"), "the outage said")
            assert icon.toolTip() == f"Unstuck: {state.text()}"
        finally:
            pg_server.start()
        fleet.task("nap").options(queue="other").enqueue(0)
        screen.wait_for(lambda: desk.unserved_popup.box, "the popup of what came after it")
        screen.wait_for(lambda: state.text().startswith("Following"), "all well again")
    finally:
        desk.close()
        fleet.close()


def test_without_dialogs_the_icon_in_the_tray_tells_until_somebody_looks(
    screen: Screen, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QSystemTrayIcon, "isSystemTrayAvailable", lambda: True)
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(QSystemTrayIcon, "showMessage", lambda icon, title, text, *more: shown.append((title, text)))
    desk = at_desk(screen, fleet, popups=False)
    try:
        ended: list[bool] = []
        desk.ended.connect(lambda: ended.append(True))
        assert desk.tray is not None
        calm = desk.tray.icon.icon().cacheKey()
        fleet.task("nap").options(queue="other").enqueue(0)
        [(title, text)] = screen.wait_for(lambda: shown, "a message at the icon")
        assert title == "No Workers Available"
        assert "Please start worker servers" in text
        assert desk.tray.icon.icon().cacheKey() != calm
        choices = {action.text(): action for action in desk.tray.menu.actions()}
        assert screen.dialogs() == []
        desk.tray.menu.aboutToShow.emit()
        assert desk.tray.icon.icon().cacheKey() == calm
        choices["Popups"].trigger()
        assert desk.popups.isChecked()
        choices["Quit"].trigger()
        assert ended == [True]
    finally:
        desk.close()


# The command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_what_it_follows_and_ends_with_a_signal(shop: Cli, number: signal.Signals) -> None:
    shop.worker()
    process = subprocess.Popen(
        [*COMMAND, "popups"], cwd=shop.folder, env=shop.environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"Following {shop.url}\n"
        process.send_signal(number)
        assert process.wait(PATIENT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_command_makes_no_ledger(shop: Cli) -> None:
    assert "There is no ledger at" in shop.refused(1, "popups")
    assert not (shop.folder / "jobs.db").exists()


def test_without_a_tray_and_without_dialogs_a_sentence_says_that_nothing_would_be_shown(shop: Cli) -> None:
    shop.worker()
    assert "This desktop has no tray" in shop.refused(1, "popups", "--no-dialogs")


def test_where_there_is_no_screen_a_sentence_says_so(shop: Cli) -> None:
    shop.worker()
    said = shop.refused(1, "popups", QT_QPA_PLATFORM="", DISPLAY="", WAYLAND_DISPLAY="")
    assert "There is no screen" in said


def test_without_qt_the_cure_is_named(shop: Cli) -> None:
    hidden = "import sys; sys.modules['PySide6'] = None"
    for use in ("from unstuck.cli.main import main; sys.exit(main(['popups']))", "import unstuck.mdp.qt"):
        done = subprocess.run(
            [sys.executable, "-c", f"{hidden}\n{use}"],
            env=shop.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "pip install 'unstuck[qt]'" in done.stderr, done.stderr


CLIENTS = 30
GARBAGE_TIMEOUT_S = 240


def test_clients_and_desks_that_are_lost_in_any_thread_are_deleted_in_their_own(shop: Cli) -> None:
    shop.worker()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.desktop.garbage", str(CLIENTS), shop.url],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=GARBAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert "thread" not in done.stderr, "Qt complains of a foreign thread"
    assert done.stdout.startswith(f"{CLIENTS} came, 0 threads are left, "), done.stdout


def test_one_crash_is_told_in_the_words_of_the_design() -> None:
    tally = CrashedCalls()
    tally.add("resize", "Worker processing your job has crashed. Job will be retried.")
    assert tally.text() == (
        "A worker processing job 'resize' has crashed.\n\n"
        "Worker processing your job has crashed. Job will be retried.\n\n"
        "The job will be automatically retried."
    )


def test_nobody_is_promised_a_retry_that_will_not_be() -> None:
    tally = CrashedCalls()
    tally.add("resize", "It crashed too often.", final=True)
    assert tally.text().endswith("The job will not be retried.")
    tally.add("resize", "It crashed too often.", final=True)
    assert tally.text().endswith("The jobs will not be retried.")
    tally.add("mail", "Job will be retried.")
    assert tally.text().endswith("2 of them will not be retried, the others automatically.")


def test_many_crashes_are_counted_and_only_a_few_named() -> None:
    tally = CrashedCalls()
    for number in range(3_000):
        tally.add(f"service-{number % 8}", "died", count=2)
    text = tally.text()
    assert "crashed 6,000 times" in text
    assert "'service-0' (750)" in text
    assert "and 3 more." in text
    assert text.endswith("The jobs will be automatically retried.")
    tally.clear()
    tally.add("mail", "died")
    assert "A worker processing job 'mail'" in tally.text()


def test_a_message_without_end_does_not_fill_the_screen() -> None:
    tally = UnservedCalls()
    tally.add("x" * 5_000, "y" * 100_000)
    assert len(tally.text()) < MAX_MESSAGE_CHARS + 300


def test_nobody_there_asks_to_start_workers() -> None:
    tally = UnservedCalls()
    tally.add("PluginX", "No workers are currently available to process this job.")
    assert tally.text() == (
        "No workers are available to process job 'PluginX'.\n\n"
        "No workers are currently available to process this job.\n\n"
        "Please start worker servers and try again."
    )
    tally.add("PluginX", "No workers are currently available to process this job.")
    assert tally.text().startswith("No workers are available to process 2 jobs: 'PluginX' (2).")


def test_a_death_says_what_became_of_the_jobs_of_the_dead_alone() -> None:
    tally = DeadWorkers()
    assert not tally.settle("w1", "requeued")
    tally.add("w1", "Dead worker detected: w1")
    assert "each job's own rule" in tally.text()
    assert tally.settle("w1", "requeued")
    assert tally.settle("w1", "failed")
    assert tally.settle("w1", "requeued")
    assert not tally.settle("w1", "worker_started")
    assert not tally.settle("w2", "requeued")
    assert not tally.settle(None, "requeued")
    assert tally.text() == (
        "Worker w1 has died.\n\nDead worker detected: w1\n\nWhat became of its jobs: 2 queued again, 1 failed."
    )
    for number in range(2, 12):
        tally.add(f"w{number}", "Dead worker detected")
    assert tally.text().startswith("11 workers have died: w1, w2, w3, w4, w5 and 6 more.")


def test_a_queue_that_nobody_serves_is_named_once() -> None:
    tally = UnservedQueues()
    for number in range(20):
        tally.add(f"Nobody serves queue {number % 7}.")
    text = tally.text()
    assert text.count("Nobody serves queue 0.") == 1
    assert "And 2 more." in text
    assert "start worker servers" in text
