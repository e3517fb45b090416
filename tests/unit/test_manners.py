"""Who reads much gives way to who is in a hurry, and not for ever."""

import threading
import time

import pytest

from unstuck.ledger import manners
from unstuck.ledger.manners import EVERY, STEP_S, give_way, hurry, politely


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each pause of a thread that gives way, which takes no time."""
    made: list[float] = []
    monkeypatch.setattr(manners.time, "sleep", made.append)
    return made


def test_whoever_reads_much_waits_until_the_hurry_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manners, "MOST_STEPS", 100_000)  # However slow this machine is.
    order: list[str] = []
    hurrying = threading.Event()

    def beat() -> None:
        with hurry():
            hurrying.set()
            # Long enough to be overtaken by one who does not give way.
            time.sleep(10 * STEP_S)
            order.append("beat")

    thread = threading.Thread(target=beat)
    thread.start()
    hurrying.wait()
    give_way()
    order.append("page")
    thread.join()
    assert order == ["beat", "page"]


def test_a_hurry_without_end_holds_nobody_up_for_ever_and_nothing_is_left_out() -> None:
    with hurry():
        assert list(politely(range(3 * EVERY))) == list(range(3 * EVERY))


def test_a_hurry_that_fails_is_over_too(pauses: list[float]) -> None:
    try:
        with hurry():
            raise ValueError
    except ValueError:
        pass
    give_way()
    assert pauses == []


def test_a_thread_in_a_hurry_does_not_give_way_to_itself(pauses: list[float]) -> None:
    with hurry():
        give_way()
    assert pauses == []
