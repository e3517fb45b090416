"""The stack file of one runner, and its text without our own frames."""

import re
import socket
from itertools import takewhile
from pathlib import Path

from unstuck.domain.autopsy import MAX_STACK_CHARS
from unstuck.runner.monitor import QUESTION
from unstuck.runner.output import OutputFile

_PACKAGE = str(Path(__file__).parent.parent / "runner")
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x|^Stack \(|^Task of job ", re.MULTILINE)
_FIRST = {"Task": 0, "Current": 1, "Stack": 1}
_ATTEMPT = f"{_PACKAGE}/async_loop.py"
_MONITOR = re.compile(rf'"{re.escape(_PACKAGE)}/monitor\.py", line \d+ in _beat$', re.MULTILINE)
_LIFE = f"{_PACKAGE}/child.py"


def tidy(text: str) -> str:
    """Give a faulthandler dump without the frames of the runner itself, its pulse, and the list of modules.

    The thread comes first that was interrupted or died; before it where jobs wait, if an event loop wrote that down:
    its own thread only shows that it waits."""
    text = text.partition("\nExtension modules:")[0].strip()
    starts = [match.start() for match in _BLOCK.finditer(text)]
    if not starts:
        return text
    blocks = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    kept = [_without_ours(block) for block in blocks if not _MONITOR.search(block)]
    kept.sort(key=lambda block: _FIRST.get(block.split(" ", 1)[0], len(_FIRST)))
    return "\n".join([text[: starts[0]].strip(), *kept]).strip()


def _without_ours(block: str) -> str:
    head, *frames = block.strip().splitlines()
    # A job on a shared loop: what called it is ours, and asyncio's.
    frames = list(takewhile(lambda frame: _ATTEMPT not in frame or not frame.endswith(" in _attempt"), frames))
    # Frames outside of the runner's life say how its process was started, whatever did that.
    frames = list(takewhile(lambda frame: _LIFE not in frame or not frame.endswith(" in serve"), frames))
    # The outermost frames are ours: cut from the last one of the user's to the end.
    while frames and (_PACKAGE in frames[-1] or "<frozen runpy>" in frames[-1]):
        frames.pop()
    return "\n".join([head, *(frames or ["  (no Python code of the job on this stack)"])]) + "\n"


class StackFile:
    """The worker's end of one runner's file of stacks."""

    def __init__(self, signs: socket.socket) -> None:
        self._signals = signs
        self._file = OutputFile("unstuck-stack", MAX_STACK_CHARS)
        self.fd = self._file.fd
        self._asked = 0
        self._told = 0
        self._wanted = False
        """Somebody is going to read what is written."""

    def ask(self) -> bool:
        """Have its pulse write down where all threads stand, which no thread notices; False where it does not listen.
        While C code holds the GIL it does not answer."""
        try:
            self._signals.send(QUESTION.pack(self._asked + 1))
        except OSError:
            return False
        self._asked += 1
        self._wanted = True
        return True

    def heard(self, number: int) -> None:
        """Note that its pulse has answered a question."""
        self._told = number
        if not self._wanted:
            # Nobody waits any longer, and what it dies of later must not be told with this.
            self._file.skip()

    @property
    def told(self) -> bool:
        """The last question is answered."""
        return self._told == self._asked

    def expect(self) -> None:
        """Say that something else will write: a signal, or the event loop."""
        self._wanted = True

    def forget(self) -> None:
        """Leave behind the stacks of one job: a process lives on, and they are not those of the next."""
        self._wanted = False
        self._file.skip()

    def text(self) -> str:
        """Give the stacks that were written down since: on our word, or in the moment of a fatal signal."""
        return tidy(self._file.peek(tail_only=False).decode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._file.close()
