"""Say who is to blame when a loop that many jobs share has to be ended because one of them would not stop."""

import msgspec

from unstuck.domain.autopsy import DeathKind
from unstuck.domain.durations import brief
from unstuck.domain.outcomes import Died, Overran, Stalled
from unstuck.worker.holds import Hold, Stop
from unstuck.worker.roster import Crew


def blame(crew: Crew, stubborn: Hold, pulse_s: float, silent_s: float, now_s: float) -> None:
    """Seal the fate of everybody in a runner that is about to be killed, since `stubborn` could not be stopped.

    Whoever keeps the loop from turning did it. Where no Python code ran at all, nobody can say who it was, and all
    that were not stopped before are suspects. Otherwise it is the one that would not stop."""
    blocker = crew.blocker if crew.blocker is not None and crew.blocker.is_news(now_s) else None
    culprit = crew.jobs.get(blocker.token) if blocker is not None else None
    if blocker is not None and culprit is not None and culprit is not stubborn:
        blocked = f"kept the event loop of its runner from turning for {brief(now_s - blocker.since_s)}"
        if culprit.stop is None:
            died = Died(f"{blocked}, so that job {stubborn.job.job_id} could not be stopped")
            culprit.stop = Stop(died, DeathKind.BLOCKED_LOOP)
        why = f"its runner was ended because job {culprit.job.job_id} {blocked}"
        _excuse(crew, f"job {culprit.job.job_id} {blocked}")
        fate = Died(why, counts=False)
    elif culprit is None and len(crew.jobs) > 1 and now_s - pulse_s > silent_s:
        why = (
            f"its runner was ended because job {stubborn.job.job_id} could not be stopped: no Python code ran there "
            f"for {brief(now_s - pulse_s)}, in whichever job"
        )
        fate = Died(why, shared="process")
    else:
        fate = Died(f"its runner was ended because job {stubborn.job.job_id} would not stop", counts=False)
    for hold in crew.jobs.values():
        if hold.stop is None:
            hold.stop = Stop(fate, DeathKind.SHARED)
        hold.stop.kill_at_s = 0.0


def _excuse(crew: Crew, why: str) -> None:
    """Tell with the end of each job that ran out of time meanwhile whose doing that was."""
    for hold in crew.jobs.values():
        stop = hold.stop
        if stop is not None and isinstance(stop.fate, Overran | Stalled):
            stop.fate = msgspec.structs.replace(stop.fate, cause=f"{stop.fate.cause}; {why}")
