"""Explain the end of a runner and of each job in it: the autopsy, and which job is to blame on a shared loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.autopsy import MAX_BESIDE, Autopsy, DeathKind, last_lines
from unstuck.domain.endings import Cancelled, Died, Outcome, Overran, Stalled
from unstuck.domain.liveness import Detector
from unstuck.domain.units import brief
from unstuck.runner.processes import OVER_PROCESS_LIMIT
from unstuck.worker.exit_status import signal_name
from unstuck.worker.fork_client import RunnerExit
from unstuck.worker.held_jobs import HeldJob, Stop
from unstuck.worker.runner_process import Finished
from unstuck.worker.slots import Slot

Explained = Died | Overran | Stalled | Cancelled


def of_death(slot: Slot, exit: RunnerExit, now_s: float) -> Autopsy:
    """Explain the end of a runner: what is the same for every job that was in it."""
    kind = DeathKind.UNKNOWN
    if exit.oom:
        kind = DeathKind.OUT_OF_MEMORY
    elif exit.cause.endswith(OVER_PROCESS_LIMIT):
        kind = DeathKind.PROCESS_LIMIT
    elif exit.signal is not None:
        kind = DeathKind.SIGNAL
    elif exit.exit_code is not None:
        kind = DeathKind.EXIT
    stdout, stderr = slot.runner.last_output()
    return Autopsy(
        kind=kind,
        summary=exit.cause,
        detector=Detector.RUNNER,
        seen_after_s=round(max(0.0, now_s - slot.gone_s), 4) if slot.gone_s is not None else None,
        signal=None if exit.signal is None else signal_name(exit.signal),
        exit_code=exit.exit_code,
        pid=exit.pid or slot.runner.pid,
        sure=exit.oom_sure or not exit.oom,
        doubt="" if exit.oom_sure else exit.oom_words,
        memory_bytes=slot.memory_bytes or None,
        max_memory_bytes=max(exit.max_rss_bytes, slot.memory_bytes) or None,
        cpu_s=round(exit.cpu_s, 3) if exit.pid else None,
        stack=slot.runner.stacks.text(),
        stdout=_tail(stdout),
        stderr=_tail(stderr),
    )


def of_stop(slot: Slot, item: Finished) -> Autopsy:
    """Explain why a job was ended while its runner lived on: it obeyed."""
    return Autopsy(
        kind=DeathKind.UNKNOWN,
        summary="",
        detector=Detector.RUNNER,
        pid=slot.runner.pid,
        memory_bytes=slot.memory_bytes or None,
        max_memory_bytes=slot.memory_bytes or None,
        stack=item.stack or slot.runner.stacks.text(),
        stdout=_tail(item.stdout),
        stderr=_tail(item.stderr),
    )


def explain(outcome: Outcome, base: Autopsy, held_job: HeldJob, ran_s: float, company: Sequence[int] = ()) -> Outcome:
    """Return the outcome with the autopsy of this very job; `company` are the jobs that were in the same process."""
    if not isinstance(outcome, Explained):
        return outcome
    stop = held_job.stop
    changes: dict[str, Any] = {"progress": held_job.progress, "ran_s": round(max(0.0, ran_s), 3)}
    if stop is not None:
        # We ended it: that a signal did it in the end is no news, and what led to it is.
        changes |= {"kind": stop.kind, "summary": outcome.cause, "signals": tuple(stop.actions), "seen_after_s": None}
    others = [job_id for job_id in company if job_id != held_job.job.job_id]
    changes |= {"beside": tuple(others[:MAX_BESIDE]), "beside_count": len(others)}
    return msgspec.structs.replace(outcome, autopsy=msgspec.structs.replace(base, **changes))


def _tail(data: bytes) -> str:
    return last_lines(data.decode("utf-8", "backslashreplace"))


def assign_blame(slot: Slot, stubborn: HeldJob, pulse_s: float, silent_s: float, now_s: float) -> None:
    """Decide the outcome of every job in a runner that is about to be killed, since `stubborn` could not be stopped.

    A job that blocks the event loop is to blame. If no Python code ran at all, it cannot be known which job it was, and
    all that were not stopped before are suspects. Otherwise it is the one that would not stop."""
    blocker = slot.blocker if slot.blocker is not None and slot.blocker.is_news(now_s) else None
    culprit = slot.jobs.get(blocker.token) if blocker is not None else None
    if blocker is not None and culprit is not None and culprit is not stubborn:
        blocked = f"kept the event loop of its runner from turning for {brief(now_s - blocker.since_s)}"
        if culprit.stop is None:
            died = Died(f"{blocked}, so that job {stubborn.job.job_id} could not be stopped")
            culprit.stop = Stop(died, DeathKind.BLOCKED_LOOP)
        why = f"its runner was ended because job {culprit.job.job_id} {blocked}"
        _excuse(slot, f"job {culprit.job.job_id} {blocked}")
        fate = Died(why, counts=False)
    elif culprit is None and len(slot.jobs) > 1 and now_s - pulse_s > silent_s:
        why = (
            f"its runner was ended because job {stubborn.job.job_id} could not be stopped: no Python code ran there "
            f"for {brief(now_s - pulse_s)}, in whichever job"
        )
        fate = Died(why, shared="process")
    else:
        fate = Died(f"its runner was ended because job {stubborn.job.job_id} would not stop", counts=False)
    for held_job in slot.jobs.values():
        if held_job.stop is None:
            held_job.stop = Stop(fate, DeathKind.SHARED)
        held_job.stop.kill_at_s = 0.0


def _excuse(slot: Slot, why: str) -> None:
    """Add to the outcome of each job that ran out of time meanwhile which job caused that."""
    for held_job in slot.jobs.values():
        stop = held_job.stop
        if stop is not None and isinstance(stop.outcome, Overran | Stalled):
            stop.outcome = msgspec.structs.replace(stop.outcome, cause=f"{stop.outcome.cause}; {why}")
