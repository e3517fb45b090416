"""Draw the demo on a terminal: who does what, whose heart beats, who died, and the score."""

import sys
import time
from itertools import groupby
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unstuck.cli.demo_fleet import Member
from unstuck.cli.demo_killer import Death
from unstuck.cli.demo_stage import Stage
from unstuck.cli.demo_summary import became
from unstuck.domain.states import WorkerState
from unstuck.store.records import JobRecord

BEAT_SHOWN_S = 0.35
WOUND_SHOWN_S = 1.6
FRAME_S = 0.12
GREY = "bright_black"
SPARKS = " ▁▂▃▄▅▆▇█"
STYLES = {"resize": "cyan", "fetch": "blue", "report": "magenta", "mail": "yellow", "charge": "green", "parse": "red"}


class LiveView:
    def __init__(self, stage: Stage, out: TextIO = sys.stdout) -> None:
        self._stage = stage
        self._console = Console(file=out, highlight=False, emoji=False, markup=False)
        # A screen of its own: what stood in the terminal before comes back, and a resize leaves no ruins.
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
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
        stage = self._stage
        width, height = self._console.width, self._console.height
        roomy = height >= 22 + max(0, stage.workers - 4)
        gap = [Text()] if roomy else []
        parts: list[RenderableType] = [self._header(width), *gap]
        shown = stage.fleet.members[: max(1, height - 10)]
        parts += [self._worker_line(member, now_s) for member in shown]
        if hidden := len(stage.fleet.members) - len(shown):
            parts.append(Text(f" and {hidden} more", GREY))
        parts += [*gap, self._gauge("waiting", stage.lookout.sight.waiting, list(stage.lookout.waiting_per_bin), width)]
        finished = list(stage.lookout.finished_per_bin)
        rate = round(sum(finished[-5:-1]) / 2) if len(finished) > 4 else sum(finished)
        parts += [self._gauge("done/s", rate, finished[:-1], width), *gap]
        used = len(parts) + 4 + len(gap)
        parts += [Text(" last deaths", GREY), self._deaths(max(1, min(6, height - used - 1))), *gap]
        parts += [self._score(), Text(f" {stage.sentence}", GREY)]
        return Group(*(_clipped(part) for part in parts))

    def _header(self, width: int) -> Text:
        stage = self._stage
        left = Text.assemble(
            (" unstuck demo", "bold"), (f"  {stage.workers} workers on {stage.ledger}, kill -9 every ", GREY)
        )
        left.append(f"{stage.kill_every_s:g}s" if stage.kill_every_s else "never", "red")
        clock = f"{min(stage.elapsed_s, stage.seconds):4.0f} of {stage.seconds:.0f} s "
        left.append(" " * max(1, width - left.cell_len - len(clock)))
        return left.append(clock, "bold")

    def _worker_line(self, member: Member, now_s: float) -> Text:
        line = Text(f" {member.name:<6}", "bold")
        if member.killed_s is not None:
            return line.append(" ✖ ", "bold red").append("killed", "red").append(self._aftermath(member), GREY)
        record = self._stage.lookout.sight.workers.get(member.pid)
        if not member.ready or record is None:
            return line.append(" ◌ ", GREY).append("starting", GREY)
        silent_s = record.silent_s + (now_s - self._stage.lookout.sight.seen_s)
        line.append(*((" ♥ ", "bold red") if silent_s < BEAT_SHOWN_S else (" ♥ ", GREY)))
        line.append(f"{silent_s:3.1f}s  ", GREY)
        if record.state is not WorkerState.ACTIVE:
            line.append(f"{record.state} ", "yellow")
        if wound := self._wound(member, now_s):
            line.append(wound, "red")
        return line.append_text(_doing(self._stage.lookout.sight.doing.get(record.id, [])))

    def _aftermath(self, member: Member) -> str:
        death = next((d for d in reversed(self._stage.deaths) if d.pid == member.pid and d.kind == "worker"), None)
        if death is None:
            return ""
        if not death.over:
            return f", holding {len(death.held)}"
        return f", {became(death)}, seen by {death.detector}"

    def _wound(self, member: Member, now_s: float) -> str:
        for death in reversed(self._stage.deaths):
            if now_s - death.killed_s > WOUND_SHOWN_S:
                break
            if death.kind == "runner" and death.name == member.name:
                return "✖ lost a runner  "
        return ""

    def _gauge(self, name: str, value: int, history: list[int], width: int) -> Text:
        room = max(8, width - 20)
        shown = history[-room:]
        top = max([*shown, 8])
        bars = "".join(SPARKS[0 if not n else max(1, round(n / top * 8))] for n in shown)
        return Text.assemble((f" {name:<9}", GREY), (f"{value:>5}  ", "bold"), (bars.rjust(room), "cyan"))

    def _deaths(self, rows: int) -> RenderableType:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(justify="right", width=6, no_wrap=True)
        table.add_column(width=15, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=10, no_wrap=True)
        table.add_column(justify="right", width=9, no_wrap=True)
        deaths = self._stage.deaths[-rows:][::-1]
        for death in deaths:
            table.add_row(*self._death_row(death))
        for _ in range(rows - len(deaths)):
            table.add_row("")
        return table

    def _death_row(self, death: Death) -> list[Text]:
        at_s = death.killed_s - (self._stage.began_s or death.killed_s)
        who = f"worker {death.name}" if death.kind == "worker" else f"runner of {death.name}"
        fast = "" if death.settled_ms is None else f"{death.settled_ms:,.0f} ms "
        return [
            Text(f"{at_s:.1f}s", GREY),
            Text(who, "red" if death.kind == "worker" else "yellow"),
            Text(became(death) if death.over else f"holding {len(death.held)} …"),
            Text(death.detector, GREY),
            Text(fast, "bold green" if (death.settled_ms or 0.0) < 1000 else "bold yellow"),
        ]

    def _score(self) -> Text:
        line = Text(" ")
        for name, number, style in self._stage.score():
            if name != "failed by design" or self._console.width >= 100:
                line.append(f"{name} ", GREY).append(f"{number:,}", style).append("  ")
        return line


def _doing(jobs: list[JobRecord]) -> Text:
    """Say what a worker has in hand: long work by its number and age, many of a kind by their count."""
    text = Text()
    now_s = time.time()
    ordered = sorted(jobs, key=lambda job: (job.task, job.id))
    for task, group in groupby(ordered, key=lambda job: job.task):
        these = list(group)
        text.append(task, STYLES.get(task, ""))
        if task == "report" and len(these) <= 2:
            ages = (f" {job.id} {max(0.0, now_s - (job.started_at or now_s)):.1f}s" for job in these)
            text.append(",".join(ages))
        elif len(these) > 1:
            text.append(f" ×{len(these)}")
        text.append("  ")
    return text if jobs else Text("idle", GREY)


def _clipped(part: RenderableType) -> RenderableType:
    if isinstance(part, Text):
        part.no_wrap, part.overflow = True, "ellipsis"
    return part
