"""Print for whoever looks: tables with colour on a terminal, plain aligned lines in a pipe, JSON on request."""

import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from unstuck.domain.durations import brief

STATE_STYLES = {
    "pending": "yellow",
    "claimed": "cyan",
    "running": "bold cyan",
    "waiting": "blue",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "bright_black",
    "quarantined": "bold magenta",
    "crashed": "red",
    "drained": "yellow",
    "suspended": "yellow",
    "active": "green",
    "draining": "yellow",
    "suspect": "bold yellow",
    "dead": "bold red",
    "stopped": "bright_black",
    "paused": "bold yellow",
    "open": "green",
}

GAP = 2
ROOM_FOR_NOTES = 24

# Anything a job or a worker wrote may end up on a terminal: escape sequences must not be obeyed there.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Cell(NamedTuple):
    """A piece of text with its colour."""

    text: str
    style: str = ""


class Column(NamedTuple):
    title: str
    right: bool = False
    wide: bool = False
    """Takes the room that is left, and is cut short on a narrow terminal."""
    spare: bool = False
    """Left out where the terminal is too narrow for everything."""


class Show:
    """Where and how a command prints."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.pretty = not as_json and sys.stdout.isatty()

    def json(self, value: Any) -> None:
        self.line(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode("utf-8"))

    def line(self, text: str = "") -> None:
        sys.stdout.write(text + "\n")

    def note(self, text: str) -> None:
        """Say something beside the data: to stderr, so that a pipe gets the data alone."""
        sys.stdout.flush()
        sys.stderr.write(text + "\n")

    def say(self, sentence: str, style: str = "") -> None:
        """Say what was done, in the colour of what it means."""
        self.rich(Cell(sentence, style)) if self.pretty else self.line(plain(sentence))

    def rich(self, *cells: Cell | str, indent: int = 0) -> None:
        """Print pieces of text on one line; wraps on a terminal, with the indent kept."""
        if not self.pretty:
            self.line(" " * indent + "".join(plain(_cell(cell).text) for cell in cells).rstrip())
            return
        from rich.padding import Padding
        from rich.text import Text

        text = Text.assemble(*((plain(_cell(cell).text), _cell(cell).style) for cell in cells))
        self._console().print(Padding(text, (0, 0, 0, indent)), highlight=False)

    def quote(self, cell: Cell, indent: int) -> None:
        """Print a line as it was written: the terminal may wrap it, we do not, so that paths can be copied whole."""
        if not self.pretty:
            self.line(" " * indent + plain(cell.text).rstrip())
            return
        from rich.text import Text

        self._console().print(Text(" " * indent + plain(cell.text), cell.style), soft_wrap=True)

    def facts(self, pairs: Sequence[tuple[str, Cell]], indent: int = 2, names: str = "bright_black") -> None:
        """Print names with their values, one below the other; long values wrap beside their name."""
        width = max(len(name) for name, _ in pairs)
        if not self.pretty:
            for name, value in pairs:
                self.line(" " * indent + name.ljust(width + GAP) + plain(value.text))
            return
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(style=names, no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs:
            grid.add_row(name, Text(plain(value.text), value.style))
        self._console().print(Padding(grid, (0, 0, 0, indent)))

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], indent: int = 0, wrap: bool = False
    ) -> None:
        """Print a table; `wrap` lets the wide column go over several lines."""
        cells = [[_cell(cell) for cell in row] for row in rows]
        if self.pretty:
            self._rich_table(columns, cells, indent, wrap)
        else:
            self._plain_table(columns, cells, indent)

    def _plain_table(self, columns: Sequence[Column], rows: list[list[Cell]], indent: int) -> None:
        lines = [[column.title.upper() for column in columns]]
        lines += [[one_line(cell.text) or "-" for cell in row] for row in rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
        for line in lines:
            padded = (
                text.rjust(width) if column.right else text.ljust(width)
                for text, width, column in zip(line, widths, columns, strict=True)
            )
            self.line(" " * indent + "  ".join(padded).rstrip())

    def _rich_table(self, columns: Sequence[Column], rows: list[list[Cell]], indent: int, wrap: bool) -> None:
        from rich.cells import cell_len
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = self._console()
        texts = [[Text(one_line(cell.text), cell.style) for cell in row] for row in rows]
        widths = [
            max(cell_len(column.title), *(cell_len(row[at].plain) for row in texts))
            for at, column in enumerate(columns)
        ]
        filled = [any(row[at].plain for row in texts) for at in range(len(columns))]
        room = console.width - indent
        kept = _columns_that_fit(columns, widths, filled, room)
        fixed = sum(widths[at] + GAP for at in kept if not columns[at].wide)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bright_black")
        for at in kept:
            column = columns[at]
            folds = wrap and column.wide
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not folds,
                overflow="fold" if folds else "ellipsis",
                width=max(len(column.title), min(widths[at], room - fixed)) if column.wide else widths[at],
            )
        for row in texts:
            table.add_row(*(row[at] for at in kept))
        console.print(Padding(table, (0, 0, 0, indent)))

    def _console(self) -> Any:
        from rich.console import Console

        # The width is asked for here: on a dumb terminal rich would take eighty columns for granted.
        width = shutil.get_terminal_size().columns
        return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def _columns_that_fit(columns: Sequence[Column], widths: Sequence[int], filled: Sequence[bool], room: int) -> list[int]:
    """Leave out empty columns, and then spare ones from the right until the rest fits."""
    kept = [at for at in range(len(columns)) if filled[at]] or list(range(len(columns)))

    def needed() -> int:
        return sum(GAP + (min(widths[at], ROOM_FOR_NOTES) if columns[at].wide else widths[at]) for at in kept)

    for at in reversed(range(len(columns))):
        if needed() <= room:
            break
        if columns[at].spare and at in kept:
            kept.remove(at)
    return kept


def state_cell(state: str, mark: bool = False) -> Cell:
    return Cell(f"● {state}" if mark else state, STATE_STYLES.get(state, ""))


def ago(at: float | None, now_s: float | None = None) -> str:
    """Write how long ago something was, or in how long it will be."""
    if at is None:
        return ""
    age_s = (time.time() if now_s is None else now_s) - at
    if age_s < -1:
        return f"in {coarse(-age_s)}"
    return "just now" if age_s < 1 else f"{coarse(age_s)} ago"


def took(from_at: float | None, to_at: float | None) -> str:
    if from_at is None or to_at is None:
        return ""
    return brief(max(0.0, to_at - from_at))


def coarse(value_s: float) -> str:
    """Write an age without digits that nobody reads: 12s, 5m, 3h20m."""
    if value_s < 1:
        return "0s"
    return brief(float(round(value_s))) if value_s < 600 else brief(round(value_s / 60) * 60.0)


def plain(text: str) -> str:
    """Make text harmless on a terminal: control characters are shown, not obeyed."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    return plain(" ".join(text.split()) if "\n" in text or "\t" in text else text)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)
