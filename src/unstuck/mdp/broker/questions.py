"""What clients ask through `mmi.` and only the ledger knows, until it goes with an order: in turn, and bounded."""

from collections import deque

from unstuck.mdp.broker.batch import MmiQuery

MAX_QUESTIONS = 10_000
MAX_QUESTIONS_PER_CLIENT = 100
MAX_BODY_BYTES = 10_000
MAX_TAKEN = 1_000
"""Questions in one order. Equal ones are asked of the ledger once."""


class Questions:
    def __init__(self) -> None:
        self._of: dict[bytes, deque[MmiQuery]] = {}
        """By client; whoever is next is first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, question: MmiQuery) -> bool:
        """Return False for a question too many, or too large."""
        waiting = self._of.get(question.client, ())
        if self._count >= MAX_QUESTIONS or len(waiting) >= MAX_QUESTIONS_PER_CLIENT:
            return False
        if sum(map(len, question.body)) > MAX_BODY_BYTES:
            return False
        self._of.setdefault(question.client, deque()).append(question)
        self._count += 1
        return True

    def forget(self, client: bytes) -> None:
        """Drop what a client asked that has gone."""
        self._count -= len(self._of.pop(client, ()))

    def take(self, portion: int) -> list[MmiQuery]:
        """Return the next questions, of each client in turn: at most `portion` different ones."""
        taken: list[MmiQuery] = []
        different: set[tuple[str, tuple[bytes, ...]]] = set()
        while self._of and len(taken) < MAX_TAKEN:
            client = next(iter(self._of))
            question = self._of[client][0]
            different.add((question.name, question.body))
            if len(different) > portion:
                break
            waiting = self._of.pop(client)
            taken.append(waiting.popleft())
            if waiting:
                self._of[client] = waiting
        self._count -= len(taken)
        return taken
