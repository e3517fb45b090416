"""Hold the jobs that runners have, and make the moves that every part of it needs: back, over, settled."""

from collections import deque

from unstuck import host
from unstuck.domain.outcomes import Cancelled, Outcome, Raised, Succeeded
from unstuck.domain.recovery import conclude
from unstuck.metrics.tallies import Tallies
from unstuck.runner.notebook import checkpoint_entry
from unstuck.store.records import Done, FollowUp, Output
from unstuck.worker import autopsies
from unstuck.worker.begun import Begun
from unstuck.worker.bench import Finished
from unstuck.worker.counting import JobCounts
from unstuck.worker.holds import Hold
from unstuck.worker.outbox import Outbox
from unstuck.worker.outcome_log import OutcomeLog
from unstuck.worker.pace import Pace
from unstuck.worker.roster import Crew, Roster
from unstuck.worker.scribes import Scribes, written


class Hands:
    """What feeding, watching and burying share. Used in the floor's thread alone."""

    def __init__(self, roster: Roster, outbox: Outbox, pace: Pace, scribes: Scribes) -> None:
        self.roster = roster
        self.ready: deque[Hold] = deque()
        """RUNNING in the ledger, and not yet with a runner."""
        self.given: dict[int, Crew] = {}
        self.begun = Begun()
        self.processed = 0
        self.ended_since_turn = 0
        self.counts = JobCounts(Tallies())
        self.outcome_log = OutcomeLog()
        self.scribes = scribes
        self._outbox = outbox
        self._pace = pace

    def job_ids(self) -> list[int]:
        """Return the jobs that runners have."""
        return [hold.job.job_id for token, crew in self.given.items() if (hold := crew.jobs.get(token)) is not None]

    def _take_reports(self, crew: Crew) -> None:
        if finished := crew.runner.read():
            # Between the two: whatever a job wrote down was sent before its report.
            self.scribes.take(crew)
            self._take_ended(crew, finished)

    def _take_ended(self, crew: Crew, finished: list[Finished]) -> None:
        if not finished:
            return
        now_s = host.boottime_s()
        began_s = crew.since_s
        self.roster.saw_life()
        if not crew.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - crew.since_s)
            crew.since_s = now_s
        # Those of a sync runner ended one after another, between two looks.
        each_s = (now_s - began_s) / len(finished)
        for number, item in enumerate(finished):
            hold = self.roster.take_off(crew, item.token)
            if hold is None or self.given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: nobody wants its outcome any more.
            if crew.is_async:
                self.counts.ran(hold, hold.given_s, now_s - hold.given_s)
            else:
                self.counts.ran(hold, began_s + number * each_s, each_s)
            self._conclude(crew, hold, item, now_s - (hold.given_s if crew.is_async else began_s))
        crew.ended += len(finished)

    def _conclude(self, crew: Crew, hold: Hold, item: Finished, ran_s: float) -> None:
        job, outcome = hold.job, item.outcome
        if item.checkpoint:
            self._outbox.put_entry(written(hold, checkpoint_entry(item.checkpoint)))
        if item.entry is not None:
            self._outbox.put_entry(written(hold, item.entry))
        if item.follow:
            self._outbox.follow[job.token] = [FollowUp(job.job_id, job.token, one) for one in item.follow]
        if isinstance(outcome, Succeeded):
            self._outbox.done.append(Done(job.job_id, job.token, outcome.result))
        else:
            ending = conclude(hold.attempt(), self._meaning(crew, hold, item, ran_s))
            self._outbox.endings.append(ending)
            self.outcome_log.ended(job, ending, host.boottime_s())
        if hold.stop is not None and crew.shared and all(other.stop is None for other in crew.jobs.values()):
            crew.runner.stacks.forget()
        if item.stdout or item.stderr:
            self._outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self._count_one()

    def _meaning(self, crew: Crew, hold: Hold, item: Finished, ran_s: float) -> Outcome:
        """Say what an end without success means: what a job raises when we stop it is our doing."""
        if hold.stop is not None and isinstance(item.outcome, Cancelled | Raised):
            return autopsies.explain(hold.stop.fate, autopsies.of_stop(crew, item), hold, ran_s)
        if isinstance(item.outcome, Cancelled):
            return Raised("CancelledError", "The task cancelled itself", "")
        return item.outcome

    def _came_back(self, crew: Crew, token: int, now_s: float) -> None:
        hold = self.roster.take_off(crew, token)
        self.begun.discard(token)
        if hold is None or self.given.pop(token, None) is None:
            return
        back: list[Hold] = []
        self._never_began(hold, back, now_s)
        self.ready.extend(back)

    def _never_began(self, hold: Hold, back: list[Hold], now_s: float) -> None:
        """Settle or keep a job that no runner entered: a drain, a deadline or a lease ends only what has begun."""
        if hold.stop is not None and isinstance(hold.stop.fate, Cancelled):
            self.counts.never_began(hold)
            self._outbox.endings.append(conclude(hold.attempt(), hold.stop.fate))
            return
        hold.stop = None
        hold.taken_s = now_s
        back.append(hold)

    def _count_one(self) -> None:
        """Count an attempt whose code came to an end by itself."""
        self.processed += 1
        self.ended_since_turn += 1
