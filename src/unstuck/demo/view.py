"""Show the demo while it runs: as live tables on a terminal, or one line per event."""

import threading
import time
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from unstuck.cli.output import one_line
from unstuck.demo.fleet import DemoDashboard, Fleet, Member
from unstuck.demo.killer import Death, Killer
from unstuck.demo.score import SnapshotReader, became
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.jobs import JobRecord


@dataclass
class Stage:
    seconds: float
    workers: int
    kill_every_s: float
    ledger: str
    fleet: Fleet
    lookout: SnapshotReader
    door: DemoDashboard
    killer: Killer | None = None
    began_s: float | None = None
    """Monotonic; None while the fleet is starting."""
    sentence: str = ""
    born_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Since the stream began; below zero there is no time."""
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    @property
    def storming(self) -> bool:
        return self.began_s is not None and self.elapsed_s < self.seconds

    @property
    def deaths(self) -> list[Death]:
        return list(self.killer.deaths) if self.killer else []

    def score(self) -> list[tuple[str, int, str]]:
        """Give the running score: name, number, style."""
        seen = self.lookout
        lost = seen.lost
        return [
            ("enqueued", seen.enqueued, "bold"),
            ("succeeded", seen.ended[JobState.SUCCEEDED], "green"),
            ("unfinished", seen.unfinished, ""),
            ("failed by design", seen.ended[JobState.FAILED], ""),
            ("retried after a crash", sum(death.requeued for death in self.deaths), "yellow"),
            ("LOST", lost, "bold red" if lost else "bold green"),
        ]


GREY = "bright_black"
SPARKS = " ▁▂▃▄▅▆▇█"
LEAST_TOP = 8
"""A gauge is not stretched to show the noise of an idle minute as mountains."""
FAST_MS = 1_000.0
COLUMNS = (("resize", 9, "cyan"), ("fetch", 9, "blue"), ("mail", 6, "yellow"), ("charge", 8, "green"))
TITLES = f" worker heart   {''.join(f'{task:<{room}}' for task, room, _ in COLUMNS)}report"
REPORTS_FROM = 16 + sum(room for _, room, _ in COLUMNS)
REPORT_ROOM = 13
CAUSE_WIDTH = 120
"""Terminals of this width have room for the cause of each death."""


def progress(elapsed_s: float, seconds: float, width: int) -> Text:
    room = max(1, width - 2)
    done = round(min(1.0, elapsed_s / seconds) * room)
    return Text.assemble(" ", ("━" * done, "green"), ("─" * (room - done), GREY))


def doing(jobs: list[JobRecord], width: int) -> Text:
    """Show what a worker has in hand: a mark for each job in the column of its task, reports with their age."""
    text = Text()
    for task, room, style in COLUMNS:
        number = sum(job.task == task for job in jobs)
        marks = "■" * number if number < room else f"■ ×{number}"
        text.append(f"{marks:<{room}}", style)
    now_s = time.time()
    reports = sorted((job for job in jobs if job.task == "report"), key=lambda job: job.id)
    fit = max(1, (width - REPORTS_FROM - 3) // REPORT_ROOM)
    for job in reports[:fit]:
        age_s = max(0.0, now_s - (job.started_at or now_s))
        text.append("■ ", "magenta").append(f"{job.id} ").append(f"{age_s:.1f}s  ", GREY)
    if len(reports) > fit:
        text.append(f"+{len(reports) - fit}", "magenta")
    return text


def gauge(name: str, value: int, history: list[int], width: int) -> Text:
    room = max(8, width - 18)
    shown = history[-room:]
    top = max([*shown, LEAST_TOP])
    bars = "".join(SPARKS[max(1, round(number / top * 8)) if number else 0] for number in shown)
    return Text.assemble((f" {name:<8}", GREY), (f"{value:>5}  ", "bold"), (bars.rjust(room), "cyan"))


def death_row(death: Death, at_s: float, width: int) -> Text:
    who = f"worker {death.name}" if death.kind == "worker" else f"runner of {death.name}"
    what = became(death) if death.over else f"holding {len(death.held)} …"
    if width >= CAUSE_WIDTH and death.over and death.cause:
        what = f"{what}: {death.cause}"
    room = max(10, width - 48)
    fast = "" if death.settled_ms is None else f"{death.settled_ms:,.0f} ms"
    line = Text.assemble(
        (f"{at_s:6.1f}s  ", GREY),
        (f"{who:<16}", "red" if death.kind == "worker" else "yellow"),
        f"{what[:room]:<{room}} ",
    )
    if death.over:
        line.append(f"{'by ' + death.detector if death.detector else '':<13}", GREY)
        line.append(f"{fast:>8}", "bold green" if (death.settled_ms or 0.0) < FAST_MS else "bold yellow")
    return line


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


STATUS_EVERY_S = 3.0


class PlainView:
    """Every line is `SECONDS WORD sentence`."""

    def __init__(self, stage: Stage, out: TextIO) -> None:
        self._stage = stage
        self._out = out
        self._lock = threading.Lock()
        self._status_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def started(self, member: Member) -> None:
        self._say("started", f"worker {member.name} (pid {member.pid})")

    def died(self, death: Death) -> None:
        who = f"worker {death.name}" if death.kind == "worker" else f"runner of {death.name}"
        if not death.over:
            self._say("killed", f"{who} (pid {death.pid}) with kill -9, holding {len(death.held)}")
            return
        how = f"seen by {death.detector}" if death.detector else "seen by nobody"
        fast = "" if death.settled_ms is None else f" in {death.settled_ms:.0f} ms"
        self._say("settled", f"{who}: {became(death)}; {how}{fast}")

    def phase(self, sentence: str) -> None:
        self._say("phase", sentence)

    def draw(self) -> None:
        elapsed_s = self._stage.elapsed_s
        if elapsed_s - self._status_s >= STATUS_EVERY_S:
            self._status_s = elapsed_s
            self._say("status", ", ".join(f"{name} {number}" for name, number, _ in self._stage.score()))

    def _say(self, word: str, sentence: str) -> None:
        with self._lock:
            self._out.write(f"{self._stage.elapsed_s:7.2f} {word:<8} {one_line(sentence)}\n")
            self._out.flush()
