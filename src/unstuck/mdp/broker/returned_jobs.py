"""Remember jobs that went back because their workers broke the protocol, so that each time they wait longer."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 60.0
MAX_JOBS = 10_000


class ReturnedJobs:
    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def next_delay_s(self, job_id: int) -> float:
        times = self._times.pop(job_id, 0)
        if len(self._times) >= MAX_JOBS:
            # Those that went back longest ago are first.
            del self._times[next(iter(self._times))]
        self._times[job_id] = times + 1
        return float(min(FIRST_DELAY_S * 2.0 ** min(times, 20), LONGEST_DELAY_S))

    def forget(self, job_id: int) -> None:
        self._times.pop(job_id, None)
