"""Sum the demo up: what was promised, what happened, and how fast each death was seen."""

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from unstuck.cli.demo_audit import Audit
from unstuck.cli.demo_killer import Death, Kind
from unstuck.cli.show import Cell, count

MAX_NAMED = 10


@dataclass(frozen=True)
class Summary:
    seconds: float
    workers: int
    ledger: str
    audit: Audit
    deaths: list[Death]
    unexpected: list[str]
    trouble: str | None
    """Why some jobs could not be enqueued, if so."""

    @property
    def ok(self) -> bool:
        given_up = any(death.given_up for death in self.deaths)
        return not (self.audit.lost or self.audit.twice or self.unexpected or given_up)

    def as_json(self) -> dict[str, Any]:
        audit = self.audit
        return {
            "ok": self.ok,
            "ledger": self.ledger,
            "seconds": self.seconds,
            "workers": self.workers,
            "enqueued": audit.enqueued,
            "succeeded": audit.succeeded,
            "failed_by_design": {
                "total": audit.raised_by_design + audit.crashed_by_design,
                "task_failed": audit.raised_by_design,
                "worker_crashed": audit.crashed_by_design,
            },
            "lost": len(audit.lost),
            "lost_jobs": {str(job_id): why for job_id, why in audit.lost.items()},
            "finished_twice": len(audit.twice),
            "finished_twice_jobs": {str(job_id): why for job_id, why in audit.twice.items()},
            "retried_after_error": audit.retried_after_error,
            "rerun_after_crash": audit.rerun_after_crash,
            "jobs_saved": audit.jobs_rerun,
            "ran_to_the_end_again": audit.ran_to_the_end_again,
            "deaths": {"workers": len(self._of("worker")), "runners": len(self._of("runner"))},
            "detection_ms": {
                "all": _times(self.deaths),
                "worker": _times(self._of("worker")),
                "runner": _times(self._of("runner")),
            },
            "detectors": dict(Counter(death.detector for death in self.deaths if death.detector)),
            "kills": [_kill(death) for death in self.deaths],
            "unexpected_exits": self.unexpected,
            "enqueue_trouble": self.trouble,
        }

    def lines(self) -> list[list[Cell]]:
        """Give the summary for people, line by line: a label, and what there is to say."""
        audit = self.audit
        by_design = audit.raised_by_design + audit.crashed_by_design
        lines = [
            _line("enqueued", f"{audit.enqueued:,}", "bold"),
            _line("succeeded", f"{audit.succeeded:,}", "green"),
            _line(
                "failed by design",
                f"{by_design:,}",
                "",
                f"{audit.raised_by_design} bad input, {audit.crashed_by_design} killed with on_crash=fail",
            ),
            _line("lost", f"{len(audit.lost):,}", "bold red" if audit.lost else "bold green"),
            _line("finished twice", f"{len(audit.twice):,}", "bold red" if audit.twice else "bold green"),
            _line("re-run after a crash", f"{audit.rerun_after_crash:,}", "", f"{audit.jobs_rerun:,} jobs saved"),
            _line("retried after error", f"{audit.retried_after_error:,}"),
            [],
        ]
        if self.deaths:
            lines.append([Cell(f"  {'killed with kill -9':<22}      n    median     worst   seen by", "bright_black")])
            lines += [_deaths_line("workers", self._of("worker")), _deaths_line("runners", self._of("runner"))]
        return lines + self._complaints()

    def _of(self, kind: Kind) -> list[Death]:
        return [death for death in self.deaths if death.kind == kind]

    def _complaints(self) -> list[list[Cell]]:
        wrong = [f"job {job_id} {why}" for job_id, why in list(self.audit.lost.items())[:MAX_NAMED]]
        wrong += [f"job {job_id}: {why}" for job_id, why in list(self.audit.twice.items())[:MAX_NAMED]]
        wrong += self.unexpected[:MAX_NAMED]
        wrong += [
            f"the {d.kind} killed in {d.name} (pid {d.pid}) was not settled in time" for d in self.deaths if d.given_up
        ]
        if self.trouble:
            wrong.append(f"some jobs were refused at the door: {self.trouble}")
        return [[], *([Cell(f"  {sentence}", "red")] for sentence in wrong)] if wrong else []

    def verdict(self) -> Cell:
        if self.ok:
            killed = len(self.deaths)
            return Cell(
                f"{killed} killed, nothing lost." if killed else "Nobody was killed, nothing lost.", "bold green"
            )
        return Cell("The demo found something wrong; see above.", "bold red")


def _line(label: str, value: str, style: str = "", note: str = "") -> list[Cell]:
    return [Cell(f"  {label:<22}"), Cell(f"{value:>7}", style), Cell(f"   {note}" if note else "", "bright_black")]


def _deaths_line(who: str, deaths: list[Death]) -> list[Cell]:
    times = _times(deaths)
    seen = Counter(death.detector for death in deaths if death.detector)
    fast = ("-", "-") if times["median"] is None else (f"{times['median']:,.0f} ms", f"{times['worst']:,.0f} ms")
    by = ", ".join(f"{name} {number}" for name, number in seen.most_common())
    return [
        Cell(f"  {who:<22}"),
        Cell(f"{len(deaths):>7,}", "bold"),
        Cell(f"{fast[0]:>10}{fast[1]:>10}", "green"),
        Cell(f"   {by}", "bright_black"),
    ]


def _times(deaths: list[Death]) -> dict[str, Any]:
    times = [death.settled_ms for death in deaths if death.settled_ms is not None]
    return {
        "count": len(times),
        "median": round(median(times), 1) if times else None,
        "worst": round(max(times), 1) if times else None,
    }


def _kill(death: Death) -> dict[str, Any]:
    return {
        "kind": death.kind,
        "worker": death.name,
        "pid": death.pid,
        "detector": death.detector or None,
        "cause": death.cause or None,
        "settled_ms": None if death.settled_ms is None else round(death.settled_ms, 1),
        "requeued": death.requeued,
        "failed": death.failed,
        "returned": death.returned,
    }


def became(death: Death) -> str:
    """Say in a few words what became of the jobs in the dead hands."""
    if len(death.held) == 1 and death.requeued + death.failed == 1:
        hand = next(iter(death.held.values()))
        return f"{hand.task} {hand.job_id} {'requeued' if death.requeued else 'failed by its rule'}"
    parts = []
    if death.requeued:
        parts.append(f"{count(death.requeued, 'job')} requeued")
    if death.failed:
        parts.append(f"{death.failed} failed by rule")
    if death.returned:
        parts.append(f"{death.returned} given back")
    if death.given_up:
        parts.append("NOT SETTLED")
    return ", ".join(parts) or "held nothing"
