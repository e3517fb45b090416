"""Clearing up after a dead worker: only its own processes die, and only certainty counts."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.stored_workers import DummyProcess

from unstuck.recovery import leftovers
from unstuck.runner.status_page import ASYNC, ENTERED_KEPT, SYNC, StatusPage


@pytest.fixture
def bodies() -> Iterator[list[DummyProcess]]:
    made = [DummyProcess() for _ in range(3)]
    yield made
    for body in made:
        body.process.send_signal(signal.SIGCONT)
        body.kill()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StatusPage]:
    made = StatusPage.create(tmp_path / "trace", 3)
    yield made
    made.close()


def occupy(page: StatusPage, slot: int, body: DummyProcess, kind: int = SYNC) -> None:
    page.set_kind(slot, kind)
    page.set_runner(slot, body.pid, body.started)


def test_fork_server_and_runners_die_and_what_they_entered_is_known(
    page: StatusPage, bodies: list[DummyProcess]
) -> None:
    fork_server, first, second = bodies
    page.set_fork_server(fork_server.pid, fork_server.started)
    occupy(page, 0, first)
    occupy(page, 1, second)
    page.enter(0, 11)
    page.enter(0, 12)
    page.enter(1, 21)
    page.enter(1, 0)
    found = leftovers.kill(str(page.path))
    assert all(body.dead for body in bodies)
    # What was finished and what is between two jobs were entered too: their outcomes died with the worker.
    assert found == leftovers.Leftovers(all_gone=True, begun_tokens=frozenset({11, 12, 21}))


def test_a_frozen_runner_dies_as_well(page: StatusPage, bodies: list[DummyProcess]) -> None:
    occupy(page, 0, bodies[0])
    bodies[0].process.send_signal(signal.SIGSTOP)
    assert leftovers.kill(str(page.path)).all_gone
    assert bodies[0].dead


def test_the_fork_server_of_a_worker_that_may_wake_up_is_spared(page: StatusPage, bodies: list[DummyProcess]) -> None:
    fork_server, runner, _ = bodies
    page.set_fork_server(fork_server.pid, fork_server.started)
    occupy(page, 0, runner)
    assert leftovers.kill(str(page.path), fork_server=False).all_gone
    assert runner.dead
    assert not fork_server.dead


def test_somebody_else_with_the_same_pid_is_not_touched(page: StatusPage, bodies: list[DummyProcess]) -> None:
    page.set_kind(0, SYNC)
    page.set_runner(0, bodies[0].pid, "1")
    assert leftovers.kill(str(page.path)).all_gone
    assert not bodies[0].dead


def test_where_an_async_runner_stood_nothing_is_known_to_be_unbegun(
    page: StatusPage, bodies: list[DummyProcess]
) -> None:
    occupy(page, 0, bodies[0])
    occupy(page, 2, bodies[1], ASYNC)
    found = leftovers.kill(str(page.path))
    assert (found.all_gone, found.begun_tokens) == (True, None)


def test_an_async_runner_whose_birth_was_not_yet_written_down_counts_too(page: StatusPage) -> None:
    page.set_kind(0, ASYNC)
    assert leftovers.kill(str(page.path)).begun_tokens is None


def test_a_slot_of_unknown_kind_counts_only_if_somebody_stood_in_it(
    page: StatusPage, bodies: list[DummyProcess]
) -> None:
    occupy(page, 0, bodies[0])
    assert leftovers.kill(str(page.path)).begun_tokens == frozenset()
    page.set_runner(1, bodies[1].pid, bodies[1].started)
    assert leftovers.kill(str(page.path)).begun_tokens is None


def test_what_a_slot_entered_is_remembered_when_its_runner_is_replaced(page: StatusPage) -> None:
    page.set_kind(0, SYNC)
    page.enter(0, 5)
    page.clear_runner(0)
    assert leftovers.kill(str(page.path)).begun_tokens == frozenset({5})


def test_a_slot_remembers_the_last_entries_and_no_more(page: StatusPage) -> None:
    for token in range(1, ENTERED_KEPT + 11):
        page.enter(0, token)
    assert page.recently_entered(0) == frozenset(range(11, ENTERED_KEPT + 11))


def test_a_slot_that_raced_on_while_nothing_was_settled_is_not_believed(page: StatusPage) -> None:
    page.set_kind(0, SYNC)
    for token in range(1, ENTERED_KEPT + 2):
        page.enter(0, token)
    # The first of them is forgotten, and its outcome may have died with the worker.
    assert leftovers.kill(str(page.path)).begun_tokens is None
    page.set_settled(0, 1)
    assert leftovers.kill(str(page.path)).begun_tokens == frozenset(range(2, ENTERED_KEPT + 2))


@pytest.mark.parametrize("content", [None, b"", b"x" * 4096])
def test_without_a_readable_page_nothing_is_certain(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "page"
    if content is not None:
        path.write_bytes(content)
    assert leftovers.kill(str(path)) == leftovers.Leftovers()
    assert leftovers.kill("") == leftovers.Leftovers()
    leftovers.remove_page(str(path))
    assert path.exists() == (content is not None), "only a page is removed"


def test_a_page_is_removed_and_removing_it_twice_is_no_trouble(page: StatusPage) -> None:
    leftovers.remove_page(str(page.path))
    assert not page.path.exists()
    leftovers.remove_page(str(page.path))


def test_only_the_runner_inside_a_lost_attempt_is_killed(page: StatusPage, bodies: list[DummyProcess]) -> None:
    for slot, body in enumerate(bodies[:2]):
        occupy(page, slot, body)
        page.enter(slot, 100 + slot)
    occupy(page, 2, bodies[2], ASYNC)
    page.enter(2, 102)
    assert leftovers.kill_attempts(str(page.path), {100, 102, 999}) == 1
    wait_for(lambda: bodies[0].dead, "the runner dead")
    assert not bodies[1].dead
    assert not bodies[2].dead
    assert leftovers.kill_attempts("", {1}) == 0
