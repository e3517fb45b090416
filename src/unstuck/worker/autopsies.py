"""Write down why a runner died or was ended, from all that its worker knows. Pure, but for reading its output."""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.autopsy import MAX_BESIDE, Autopsy, DeathKind, last_lines
from unstuck.domain.liveness import Detector
from unstuck.domain.outcomes import Cancelled, Died, Outcome, Overran, Stalled
from unstuck.runner.crowd import TOO_MANY
from unstuck.worker.bench import Finished, RunnerExit
from unstuck.worker.bench_exits import signal_name
from unstuck.worker.holds import Hold
from unstuck.worker.roster import Crew

Explained = Died | Overran | Stalled | Cancelled


def of_death(crew: Crew, exit: RunnerExit, now_s: float) -> Autopsy:
    """Explain the end of a runner: what is the same for every job that was in it."""
    kind = DeathKind.UNKNOWN
    if exit.oom:
        kind = DeathKind.OUT_OF_MEMORY
    elif exit.cause.endswith(TOO_MANY):
        kind = DeathKind.PROCESS_LIMIT
    elif exit.signal is not None:
        kind = DeathKind.SIGNAL
    elif exit.exit_code is not None:
        kind = DeathKind.EXIT
    stdout, stderr = crew.runner.last_output()
    return Autopsy(
        kind=kind,
        summary=exit.cause,
        detector=Detector.RUNNER,
        seen_after_s=round(max(0.0, now_s - crew.gone_s), 4) if crew.gone_s is not None else None,
        signal=None if exit.signal is None else signal_name(exit.signal),
        exit_code=exit.exit_code,
        pid=exit.pid or crew.runner.pid,
        sure=exit.oom_sure or not exit.oom,
        doubt="" if exit.oom_sure else exit.oom_words,
        memory_bytes=crew.memory_bytes or None,
        max_memory_bytes=max(exit.max_rss_bytes, crew.memory_bytes) or None,
        cpu_s=round(exit.cpu_s, 3) if exit.pid else None,
        stack=crew.runner.stacks.text(),
        stdout=_tail(stdout),
        stderr=_tail(stderr),
    )


def of_stop(crew: Crew, item: Finished) -> Autopsy:
    """Explain why a job was ended while its runner lived on: it obeyed."""
    return Autopsy(
        kind=DeathKind.UNKNOWN,
        summary="",
        detector=Detector.RUNNER,
        pid=crew.runner.pid,
        memory_bytes=crew.memory_bytes or None,
        max_memory_bytes=crew.memory_bytes or None,
        stack=item.stack or crew.runner.stacks.text(),
        stdout=_tail(item.stdout),
        stderr=_tail(item.stderr),
    )


def explain(outcome: Outcome, base: Autopsy, hold: Hold, ran_s: float, company: Sequence[int] = ()) -> Outcome:
    """Give the outcome with the autopsy of this very job; `company` are the jobs that were in the same process."""
    if not isinstance(outcome, Explained):
        return outcome
    stop = hold.stop
    changes: dict[str, Any] = {"progress": hold.progress, "ran_s": round(max(0.0, ran_s), 3)}
    if stop is not None:
        # We ended it: that a signal did it in the end is no news, and what led to it is.
        changes |= {"kind": stop.kind, "summary": outcome.cause, "signals": tuple(stop.tried), "seen_after_s": None}
    others = [job_id for job_id in company if job_id != hold.job.job_id]
    changes |= {"beside": tuple(others[:MAX_BESIDE]), "beside_count": len(others)}
    return msgspec.structs.replace(outcome, autopsy=msgspec.structs.replace(base, **changes))


def _tail(data: bytes) -> str:
    return last_lines(data.decode("utf-8", "backslashreplace"))
