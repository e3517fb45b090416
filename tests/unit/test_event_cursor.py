"""A cursor delivers every event once, in whatever order transactions begin, write, commit and are rolled back."""

import random
from dataclasses import dataclass, field

import pytest

from unstuck.domain import event_cursor as cursors
from unstuck.domain.event_cursor import Cursor, read_cursor
from unstuck.errors import ConfigError

Row = tuple[int, int]


@dataclass
class Database:
    """Transactions and events as PostgreSQL numbers them, without a PostgreSQL."""

    next_transaction: int = 700
    next_id: int = 1
    open: dict[int, list[Row]] = field(default_factory=dict)
    visible: list[Row] = field(default_factory=list)

    def act(self, chance: random.Random) -> None:
        step = chance.random()
        if step < 0.3 or not self.open:
            self.open[self.next_transaction] = []
            self.next_transaction += 1
        elif step < 0.7:
            transaction = chance.choice(list(self.open))
            for _ in range(chance.choice([1, 1, 1, 40])):
                self.open[transaction].append((transaction, self.next_id))
                self.next_id += 1
        else:
            written = self.open.pop(chance.choice(list(self.open)))
            if step < 0.95:
                self.visible += written

    def page(self, cursor: Cursor, limit: int) -> tuple[list[Row], frozenset[int]]:
        behind = sorted(row for row in self.visible if cursor.is_behind(*row))
        return behind[:limit], frozenset(self.open)


def test_each_event_is_delivered_once(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for seed in range(40):
        for named in [3, 1_000]:
            with subtests.test(seed=seed, named=named):
                monkeypatch.setattr(cursors, "MAX_OPEN", named)
                monkeypatch.setattr(cursors, "MAX_CHARS", 100_000)
                chance = random.Random(seed)
                database, cursor, told = Database(), Cursor(), []
                for _ in range(150):
                    for _ in range(chance.randrange(4)):
                        database.act(chance)
                    limit = chance.choice([1, 7, 500])
                    rows, running = database.page(cursor, limit)
                    cut = chance.randrange(len(rows)) if rows and chance.random() < 0.2 else None
                    for number, row in enumerate(rows):
                        cursor = cursor.after(*row, 1.5, running)
                        told.append(row)
                        if number == cut:
                            break  # The reader is cut off in the middle of a page.
                    else:
                        if len(rows) < limit:
                            cursor = cursor.settled(running)
                    if cut is not None or chance.random() < 0.1:
                        cursor = read_cursor(str(cursor)).resumed()
                while True:
                    rows, running = database.page(cursor, 500)
                    if not rows:
                        break
                    for row in rows:
                        cursor = cursor.after(*row, 1.5, running)
                        told.append(row)
                assert set(told) == set(database.visible)
                if named == 1_000:
                    assert len(told) == len(set(told)), "an event was delivered twice"


def test_a_cursor_is_read_as_it_was_written() -> None:
    full = Cursor(90, 12, 1_500, frozenset({70, 80}), ((70, 5),), ended=True)
    for cursor in (Cursor(), Cursor(ended=True), Cursor(3, 3, 9), full):
        assert read_cursor(str(cursor)) == cursor
    assert str(full) == "12.90.1500.20_5.10.end"


@pytest.mark.parametrize(
    "text", ["", "7", "rubbish", "1.2", "1.2.x", "-1.2.3", "1.2.3.4.x", "1.2.3.from", "9" * 2_000, "²"]
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Send back the cursor"):
        read_cursor(text)
