"""Draw the demo on a terminal: who does what, whose heart beats, who died, and the score."""

import time
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from unstuck.cli.demo_fleet import Member
from unstuck.cli.demo_killer import Death
from unstuck.cli.demo_live_rows import GREY, TITLES, death_row, doing, gauge, progress
from unstuck.cli.demo_stage import Stage
from unstuck.cli.demo_summary import became
from unstuck.domain.states import WorkerState

FRAME_S = 0.12
BEAT_SHOWN_S = 0.35
WOUND_SHOWN_S = 1.6
ROOMY_LINES = 22
"""With fewer lines than this (for four workers) the blank ones go first."""
NARROW = 72
MAX_DEATHS = 12
SCORE_WIDTHS = {"failed by design": 100, "retried after a crash": 78, "unfinished": 55}
FIXED_LINES = 9
"""Header, progress, titles, two gauges, title of the deaths, one death, score and sentence."""


class LiveView:
    def __init__(self, stage: Stage, out: TextIO) -> None:
        self._stage = stage
        self._console = Console(file=out, highlight=False, emoji=False, markup=False)
        # A screen of its own: what stood in the terminal before comes back, and a resize leaves no ruins.
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._drawn_s = 0.0

    @property
    def possible(self) -> bool:
        return not self._console.is_dumb_terminal

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def started(self, member: Member) -> None:
        """Replacements are seen in their row."""

    def died(self, death: Death) -> None:
        """Deaths are seen in the list."""

    def phase(self, sentence: str) -> None:
        self._stage.sentence = sentence

    def draw(self) -> None:
        now_s = time.monotonic()
        if now_s - self._drawn_s >= FRAME_S:
            self._drawn_s = now_s
            self._live.update(self._picture(now_s), refresh=True)

    # The picture ------------------------------------------------------------------------------

    def _picture(self, now_s: float) -> RenderableType:
        stage, seen = self._stage, self._stage.lookout
        width, height = self._console.width, self._console.height
        gap = [Text()] if height >= ROOMY_LINES + stage.workers - 4 else []
        lines = [
            self._header(width),
            progress(stage.elapsed_s, stage.seconds, width),
            *gap,
            *self._workers(now_s, height),
        ]
        lines += [*gap, gauge("waiting", seen.sight.waiting, list(seen.waiting_per_bin), width)]
        lines += [gauge("done/s", seen.rate, list(seen.finished_per_bin)[:-1], width), *gap]
        below = [*gap, self._score(width), Text(f" {stage.sentence}", GREY)]
        room = max(1, min(MAX_DEATHS, height - len(lines) - 1 - len(below)))
        lines += [Text(" last deaths", GREY), *self._deaths(room, width), *below]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _header(self, width: int) -> Text:
        stage = self._stage
        line = Text(" unstuck demo", "bold")
        if width >= NARROW:
            line.append(f"   {stage.workers} workers on {stage.ledger}, kill -9 every ", GREY)
            line.append(f"{stage.kill_every_s:g}s" if stage.kill_every_s else "never", "red")
        clock = f"{min(stage.elapsed_s, stage.seconds):.0f} of {stage.seconds:.0f} s "
        line.append(" " * max(1, width - line.cell_len - len(clock)))
        return line.append(clock, "bold")

    def _score(self, width: int) -> Text:
        line = Text(" ")
        for name, number, style in self._stage.score():
            # The least telling numbers give way on a narrow screen.
            if width >= SCORE_WIDTHS.get(name, 0):
                line.append(f"{name} ", GREY).append(f"{number:,}", style).append("  ")
        return line

    # Workers ----------------------------------------------------------------------------------

    def _workers(self, now_s: float, height: int) -> list[Text]:
        members = self._stage.fleet.members
        shown = members[: max(1, height - FIXED_LINES)]
        lines = [Text(TITLES, GREY), *(self._worker(member, now_s) for member in shown)]
        if len(shown) < len(members):
            lines[-1] = Text(f" and {len(members) - len(shown) + 1} more", GREY)
        return lines

    def _worker(self, member: Member, now_s: float) -> Text:
        line = Text(f" {member.name:<7}", "bold")
        if member.killed_s is not None:
            return line.append("✖ ", "bold red").append("killed", "red").append(self._aftermath(member), GREY)
        sight = self._stage.lookout.sight
        record = sight.workers.get(member.pid)
        if not member.ready or record is None:
            return line.append("◌ starting", GREY)
        silent_s = record.silent_s + (now_s - sight.seen_s)
        line.append("♥ ", "bold red" if silent_s < BEAT_SHOWN_S else GREY).append(f"{silent_s:.1f}s  ", GREY)
        line.append_text(doing(sight.doing.get(record.id, []), self._console.width))
        if record.state is not WorkerState.ACTIVE:
            line.append(f" {record.state}", "yellow")
        if self._is_wounded(member, now_s):
            line.append(" ✖ lost a runner", "red")
        return line

    def _aftermath(self, member: Member) -> str:
        death = next((d for d in reversed(self._stage.deaths) if d.pid == member.pid and d.kind == "worker"), None)
        if death is None:
            return ""
        return f", {became(death)}" if death.over else f", holding {len(death.held)}"

    def _is_wounded(self, member: Member, now_s: float) -> bool:
        recent = (death for death in self._stage.deaths[-4:] if now_s - death.killed_s < WOUND_SHOWN_S)
        return any(death.kind == "runner" and death.name == member.name for death in recent)

    # Deaths -----------------------------------------------------------------------------------

    def _deaths(self, rows: int, width: int) -> list[Text]:
        began_s = self._stage.began_s or 0.0
        lines = [death_row(death, death.killed_s - began_s, width) for death in self._stage.deaths[-rows:][::-1]]
        return lines + [Text()] * (rows - len(lines))
