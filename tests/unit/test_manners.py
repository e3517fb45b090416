"""Who reads much gives way to who is in a hurry, and not for ever."""

import threading
import time

from unstuck.ledger.manners import EVERY, MOST_STEPS, STEP_S, give_way, hurry, politely


def test_whoever_reads_much_waits_until_the_hurry_is_over() -> None:
    order: list[str] = []
    hurrying = threading.Event()

    def beat() -> None:
        with hurry():
            hurrying.set()
            # Long enough to be overtaken by one who does not give way, shorter than that one's patience.
            time.sleep(STEP_S * MOST_STEPS / 5)
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


def test_a_hurry_that_fails_is_over_too() -> None:
    try:
        with hurry():
            raise ValueError
    except ValueError:
        pass
    begun_s = time.monotonic()
    for _ in range(1_000):
        give_way()
    # A thousand waits would take ten seconds.
    assert time.monotonic() - begun_s < MOST_STEPS * STEP_S * 500


def test_a_thread_in_a_hurry_does_not_give_way_to_itself() -> None:
    with hurry():
        begun_s = time.monotonic()
        for _ in range(1_000):
            give_way()
    # A thousand waits would take ten seconds.
    assert time.monotonic() - begun_s < MOST_STEPS * STEP_S * 500
