"""Stacks are shown with the job's code first, and without ours, whoever wrote them down."""

import threading

from unstuck.runner import stacks
from unstuck.worker.stack_text import tidy


def stand_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait()


def told_by_another_thread() -> str:
    """Give what the pulse would write of us."""
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.append(stacks.of_threads()))
    asking.start()
    asking.join()
    return told[0]


def test_the_threads_of_a_process_are_told_with_the_main_one_first() -> None:
    begun, end = threading.Event(), threading.Event()
    other = threading.Thread(target=stand_here, args=(begun, end))
    other.start()
    begun.wait()
    try:
        blocks = told_by_another_thread().split("\n\n")
    finally:
        end.set()
        other.join()
    assert blocks[0].startswith(f"Current thread 0x{threading.main_thread().ident:016x} (most recent call first):\n")
    assert "in told_by_another_thread" in blocks[0]
    [found] = [block for block in blocks if "in stand_here" in block]
    assert found.startswith(f"Thread 0x{other.ident:016x} (most recent call first):\n")
    assert all("of_threads" not in block for block in blocks), "who asks is not told"


def test_a_deep_stack_is_bounded() -> None:
    def fall(depth: int) -> str:
        return fall(depth - 1) if depth else told_by_another_thread()

    block = fall(2 * stacks.MAX_FRAMES).split("\n\n")[0]
    assert block.count("  File ") == stacks.MAX_FRAMES
    assert block.rstrip().endswith("\n  ...")


def test_what_a_signal_writes_of_one_thread_comes_before_the_others() -> None:
    room = str(stacks.__file__).replace("stacks.py", "sync_loop.py")
    text = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in beside\n\n'
        f'Stack (most recent call first):\n  File "job.py", line 7 in job\n  File "{room}", line 3 in run\n'
    )
    assert tidy(text) == (
        'Stack (most recent call first):\n  File "job.py", line 7 in job\n\n'
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in beside'
    )


def test_frames_that_started_the_process_of_a_runner_are_not_the_jobs() -> None:
    room = str(stacks.__file__).removesuffix("stacks.py")
    text = (
        'Current thread 0x01 (most recent call first):\n  File "job.py", line 7 in job\n'
        f'  File "{room}sync_loop.py", line 3 in run\n  File "{room}child.py", line 9 in live\n'
        f'  File "{room}nursery.py", line 1 in _become\n  File "debugger.py", line 2 in start\n'
    )
    assert tidy(text) == 'Current thread 0x01 (most recent call first):\n  File "job.py", line 7 in job'
