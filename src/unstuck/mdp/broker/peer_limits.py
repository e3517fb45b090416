"""Limit what workers that misbehave can cause: READY messages, and jobs that go back because of them."""

READY_BURST = 30.0
READY_PER_S = 1.0
"""READY messages of one peer: how many at once, and how many per second after that."""
MAX_PEERS = 10_000

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 60.0
MAX_JOBS = 10_000


class ReadyLimit:
    """Limit how often each peer says READY, by a token bucket."""

    def __init__(self) -> None:
        self._left: dict[bytes, tuple[float, float]] = {}
        """By peer: its tokens, and when they were counted. The peers that came longest ago are first."""

    def allow(self, identity: bytes, now_s: float) -> bool:
        left, at_s = self._left.pop(identity, (READY_BURST, now_s))
        left = min(READY_BURST, left + (now_s - at_s) * READY_PER_S)
        allowed = left >= 1
        if len(self._left) >= MAX_PEERS:
            del self._left[next(iter(self._left))]
        self._left[identity] = (left - allowed, now_s)
        return allowed


class ReturnedJobs:
    """Jobs that were released because their workers broke the protocol. Each time they wait longer."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def next_delay_s(self, job_id: int) -> float:
        times = self._times.pop(job_id, 0)
        if len(self._times) >= MAX_JOBS:
            # The one that was released longest ago is first.
            del self._times[next(iter(self._times))]
        self._times[job_id] = times + 1
        return float(min(FIRST_DELAY_S * 2.0 ** min(times, 20), LONGEST_DELAY_S))

    def forget(self, job_id: int) -> None:
        self._times.pop(job_id, None)
