"""Learn how fast jobs and turns go, and from that how much to hold ahead of the runners.

Work held ahead hides the time of a commit, but a job in our hands is a job that nobody else can take:
so what is held is what will be started within the next two turns, and nothing while jobs are long.
"""

import math

SMOOTHING = 0.2
MAX_LOOKAHEAD = 500
MAX_DEPTH = 64
TURNS_AHEAD = 2.0
FIRST_TURN_S = 0.005
SHORTEST_JOB_S = 0.00002
MAX_AHEAD_S = 0.05
MAX_SILENCE_S = 0.25
SLOW_JOB_S = 0.05
SLOW_FACTOR = 5
LEAST_AHEAD_SHARE = 0.05


class Pace:
    def __init__(self) -> None:
        self.turn_s = FIRST_TURN_S
        self.ends_per_s = 0.0
        self.ended_s = 0.0
        self.sync_job_s: float | None = None
        self.ahead_share = 0.0

    def saw_turn(self, duration_s: float) -> None:
        self.turn_s += SMOOTHING * (duration_s - self.turn_s)

    def saw_ends(self, count: int, elapsed_s: float, now_s: float) -> None:
        """Note `count` jobs that ended in the last `elapsed_s`."""
        if count:
            self.ended_s = now_s
        rate = count / max(elapsed_s, 1e-4)
        self.ends_per_s += SMOOTHING * (rate - self.ends_per_s)

    def saw_claimed(self, ahead: int, count: int) -> None:
        """Note how many of the claimed may run ahead of the runners."""
        self.ahead_share += SMOOTHING * (ahead / count - self.ahead_share)

    def may_run_ahead(self, wanted: int) -> int:
        """Give how many of `wanted` to claim beyond the free slots: jobs that may not run ahead would only lie here."""
        return math.ceil(wanted * self.ahead_share) if self.ahead_share > LEAST_AHEAD_SHARE else 0

    def saw_sync_jobs(self, count: int, elapsed_s: float) -> None:
        each_s = elapsed_s / count
        known_s = self.sync_job_s
        self.sync_job_s = each_s if known_s is None else known_s + SMOOTHING * (each_s - known_s)

    def lookahead(self, slots: int, now_s: float) -> int:
        """Give how many jobs to claim beyond the free slots."""
        # A fast hour says nothing while the slots are full of long jobs.
        if self.ends_per_s < 1.0 or now_s - self.ended_s > MAX_SILENCE_S:
            return 0
        return min(MAX_LOOKAHEAD, 2 * slots, math.ceil(self.ends_per_s * self.turn_s * TURNS_AHEAD))

    def slow_s(self) -> float:
        """Give how long a job must take for its runner to count as busy with a long one."""
        return max(SLOW_JOB_S, SLOW_FACTOR * (self.sync_job_s or 0.0))

    def depth(self) -> int:
        """Give how many RUNNING jobs to queue at a sync runner behind the one that it is in."""
        if self.sync_job_s is None:
            return 0
        ahead_s = min(MAX_AHEAD_S, TURNS_AHEAD * self.turn_s)
        return min(MAX_DEPTH, int(ahead_s / max(self.sync_job_s, SHORTEST_JOB_S)))
