"""Draw the rows of the live view, each from plain facts."""

import time

from rich.text import Text

from unstuck.cli.demo_killer import Death
from unstuck.cli.demo_summary import became
from unstuck.store.records import JobRecord

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
