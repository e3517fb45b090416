"""The desktop application on a screen that nobody sees: real workers are killed, and people are told."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.shop import COMMAND, Shop
from tests.fleet import Fleet
from tests.pg import PgServer
from tests.qt.screen import QSystemTrayIcon, Screen

from unstuck.desktop.desk import Desk
from unstuck.desktop.event_rows import MAX_ROWS, EventRows
from unstuck.domain.events import Event

PATIENT_S = 60.0


@pytest.fixture
def fleet(either_shop: Shop) -> Iterator[Fleet]:
    fleet = Fleet(either_shop.url, either_shop.folder)
    yield fleet
    fleet.close()


def at_desk(screen: Screen, fleet: Fleet, popups: bool = True) -> Desk:
    """Sit down, and wait until nothing is missed any more."""
    desk = Desk(fleet.app.settings, popups=popups)
    began: list[bool] = []
    desk.following_began.connect(lambda: began.append(True))
    screen.wait_for(lambda: began and desk.window.state.text().startswith("Following"), "the ledger followed")
    return desk


def kinds(desk: Desk) -> list[str]:
    rows = desk.window.rows
    return [rows.event_at(row).kind for row in range(rows.rowCount())]


def test_the_death_of_a_worker_pops_up_with_what_became_of_its_job(screen: Screen, fleet: Fleet) -> None:
    victim = fleet.start("--concurrency", "1", "--name", "ada")
    fleet.start("--concurrency", "1", "--queues", "other")
    job, _ = fleet.begin("nap_again", 300)
    desk = at_desk(screen, fleet)
    try:
        assert desk.window.isVisible(), "without a tray there is the window"
        assert kinds(desk).count("worker_started") == 2, "what happened before is in the list"
        assert screen.dialogs() == [], "and pops up no more"
        dead_id = victim.id
        victim.kill()
        screen.wait_for(lambda: desk.death_popup.box, "a popup")
        box = desk.death_popup.box
        assert box is not None
        screen.wait_for(lambda: "1 queued again" in box.text(), "what became of its job")
        assert box.windowTitle() == "Worker Crashed"
        assert f"Worker ada ({dead_id}) has died." in box.text()
        assert kinds(desk)[:2] == ["requeued", "worker_dead"]
        desk.window.table.selectRow(0)
        assert desk.window.details.toPlainText().startswith("requeued, ")
        assert f"job {job.id}, worker {dead_id}" in desk.window.details.toPlainText()
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
        assert kinds(desk) == ["no_workers"]
    finally:
        desk.close()


def test_without_dialogs_the_list_tells(screen: Screen, fleet: Fleet) -> None:
    desk = at_desk(screen, fleet, popups=False)
    try:
        fleet.task("nap").options(queue="other").enqueue(0)
        screen.wait_for(lambda: kinds(desk) == ["no_workers"], "the event")
        assert screen.dialogs() == []
    finally:
        desk.close()


def test_an_outage_is_said_and_what_happened_after_it_is_told(
    screen: Screen, pg_server: PgServer, pg_url: str, tmp_path: Path
) -> None:
    fleet = Fleet(pg_url, tmp_path)
    desk = at_desk(screen, fleet)
    try:
        pg_server.stop()
        try:
            screen.wait_for(lambda: not desk.window.state.text().startswith("Following"), "the outage said")
        finally:
            pg_server.start()
        fleet.task("nap").options(queue="other").enqueue(0)
        screen.wait_for(lambda: desk.unserved_popup.box, "the popup of what came after it")
        screen.wait_for(lambda: desk.window.state.text().startswith("Following"), "all well again")
    finally:
        desk.close()
        fleet.close()


def test_with_a_tray_the_window_comes_and_goes_and_the_icon_stays(
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
        assert not desk.window.isVisible()
        calm = desk.tray.icon.icon().cacheKey()
        fleet.task("nap").options(queue="other").enqueue(0)
        [(title, text)] = screen.wait_for(lambda: shown, "a message at the icon")
        assert title == "No Workers Available"
        assert "Please start worker servers" in text
        assert desk.tray.icon.icon().cacheKey() != calm
        choices = {action.text(): action for action in desk.tray.menu.actions()}
        choices["Show events"].trigger()
        assert desk.window.isVisible()
        assert desk.tray.icon.icon().cacheKey() == calm
        desk.window.close()
        screen.work()
        assert ended == []
        choices["Popups"].trigger()
        assert desk.popups.isChecked()
        choices["Quit"].trigger()
        assert ended == [True]
    finally:
        desk.close()


def test_the_list_has_an_end_and_shows_nothing_twice(screen: Screen) -> None:
    rows = EventRows()
    rows.add([Event("requeued", 0.0, f"number {number}", number) for number in range(1, 301)])
    rows.add([Event("requeued", 0.0, "again", 300), Event("failed", 0.0, "new", 301)])
    assert rows.rowCount() == 301
    rows.add([Event("requeued", 0.0, f"number {number}", number) for number in range(302, 5_000)])
    assert rows.rowCount() == MAX_ROWS
    assert rows.event_at(0).id == 4_999
    assert rows.event_at(MAX_ROWS - 1).id == 4_000


# The command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_what_it_follows_and_ends_with_a_signal(shop: Shop, number: signal.Signals) -> None:
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


def test_the_command_makes_no_ledger(shop: Shop) -> None:
    assert "There is no ledger at" in shop.refused(1, "popups")
    assert not (shop.folder / "jobs.db").exists()


def test_where_there_is_no_screen_a_sentence_says_so(shop: Shop) -> None:
    shop.worker()
    said = shop.refused(1, "popups", QT_QPA_PLATFORM="", DISPLAY="", WAYLAND_DISPLAY="")
    assert "There is no screen" in said


def test_without_qt_the_cure_is_named(shop: Shop) -> None:
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
