"""Print for whoever looks: tables with colour on a terminal, plain aligned lines in a pipe, JSON on request.

No other module of the command line writes to stdout or stderr: everything that others wrote is made harmless here.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import typer

from unstuck.domain.terminal import harmless, harmless_json
from unstuck.domain.units import brief

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


class Output:
    """Where and how a command prints."""

    def __init__(self, as_json: bool, ledger_name: Callable[[], str] | None = None) -> None:
        self.as_json = as_json
        self._ledger_name = ledger_name
        self.pretty = not as_json and sys.stdout.isatty()

    def json(self, value: Any) -> None:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode("utf-8")
        self.json_line(text)

    def json_line(self, text: str) -> None:
        """Print JSON that is written already."""
        sys.stdout.write(harmless_json(text) + "\n")

    def line(self, text: str = "") -> None:
        sys.stdout.write(harmless(text) + "\n")

    def output(self, stdout: bytes, stderr: bytes, *, raw: bool) -> None:
        """Print what a job printed, each stream on its own: byte by byte if `raw` or in a pipe, harmless otherwise."""
        for stream, data in ((sys.stdout, stdout), (sys.stderr, stderr)):
            if not data:
                continue
            if not data.endswith(b"\n"):
                data += b"\n"
            if raw or not stream.isatty():
                stream.flush()
                stream.buffer.write(data)
                stream.buffer.flush()
            else:
                stream.write(harmless(data.decode("utf-8", "backslashreplace")))
                stream.flush()

    def note(self, text: str) -> None:
        """Say something beside the data: to stderr, so that a pipe gets the data alone."""
        complain(text)

    def empty(self, sentence: str) -> None:
        """Say that a list is empty, and in which ledger: the one that was meant may be another."""
        self.note(sentence if self._ledger_name is None else f"{sentence} Ledger: {self._ledger_name()}")

    def missing(self, answers: Iterable[str]) -> None:
        """Say in which ledger jobs were looked for, if one of these answers is that it is missing there."""
        if "missing" in answers and not self.as_json:
            self.empty("A job that does not exist was never stored, or was pruned after it ended.")

    def say(self, sentence: str, style: str = "") -> None:
        """Say what was done, in the colour of what it means."""
        self.rich(Cell(sentence, style)) if self.pretty else self.line(harmless(sentence))

    def rich(self, *cells: Cell | str, indent: int = 0) -> None:
        """Print pieces of text on one line; wraps on a terminal, with the indent kept."""
        if not self.pretty:
            self.line(" " * indent + "".join(harmless(_cell(cell).text) for cell in cells).rstrip())
            return
        from rich.padding import Padding
        from rich.text import Text

        text = Text.assemble(*((harmless(_cell(cell).text), _cell(cell).style) for cell in cells))
        self._console().print(Padding(text, (0, 0, 0, indent)), highlight=False)

    def quote(self, cell: Cell, indent: int) -> None:
        """Print a line as it was written: the terminal may wrap it, we do not, so that paths can be copied whole."""
        if not self.pretty:
            self.line(" " * indent + harmless(cell.text).rstrip())
            return
        from rich.text import Text

        self._console().print(Text(" " * indent + harmless(cell.text), cell.style), soft_wrap=True)

    def facts(self, pairs: Sequence[tuple[str, Cell]], indent: int = 2, names: str = "bright_black") -> None:
        """Print names with their values, one below the other; long values wrap beside their name."""
        width = max(len(name) for name, _ in pairs)
        if not self.pretty:
            for name, value in pairs:
                self.line(" " * indent + name.ljust(width + GAP) + harmless(value.text))
            return
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(style=names, no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs:
            grid.add_row(harmless(name), Text(harmless(value.text), value.style))
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


def complain(text: str) -> None:
    """Say something on stderr, after all that was printed before."""
    sys.stdout.flush()
    sys.stderr.write(harmless(text) + "\n")


def confirm(question: str) -> None:
    """Ask for a yes on the terminal; end the command with exit code 1 if it is not given."""
    if not typer.confirm(harmless(question), err=True):
        raise typer.Exit(1)


def one_line(text: str) -> str:
    return harmless(" ".join(text.split()) if "\n" in text or "\t" in text else text)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)
