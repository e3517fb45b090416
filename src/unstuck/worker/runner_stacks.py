"""Ask a runner where its threads stand, know when it has written that down, and read it."""

import socket

from unstuck.domain.autopsy import MAX_STACK_CHARS
from unstuck.runner.signs import QUESTION
from unstuck.worker.bench_output import OutputFile
from unstuck.worker.stack_text import tidy


class RunnerStacks:
    """The worker's end of one runner's file of stacks."""

    def __init__(self, signs: socket.socket) -> None:
        self._signs = signs
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
            self._signs.send(QUESTION.pack(self._asked + 1))
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
