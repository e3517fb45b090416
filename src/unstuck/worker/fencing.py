"""Say until when an attempt may run without a confirmed beat, so that two never run for long at once."""

from unstuck.worker.holds import Hold

MARGIN_SHARE = 0.1
MAX_MARGIN_S = 2.0


def lease_end_s(confirmed_s: float, timeout_s: float) -> float:
    """Give the end of a lease on our own clock.

    It counts from when the last confirmed beat was *sent*: the ledger wrote it later than that, and so
    takes the job away later than we give it up.
    """
    return confirmed_s + timeout_s - min(MAX_MARGIN_S, MARGIN_SHARE * timeout_s)


def may_begin(hold: Hold, confirmed_s: float, now_s: float) -> bool:
    """Say whether user code may begin now: not after the lease, when the job may be somebody else's.

    This holds for every policy: what has not begun costs nothing to give back."""
    return hold.lease_s is None or now_s < lease_end_s(confirmed_s, hold.lease_s)


def must_stop_at_s(hold: Hold, confirmed_s: float) -> float | None:
    """Give when this job must be stopped unless a beat is confirmed; None where it may go on.

    A job that would fail, not be retried, goes on: nobody else will take it, and it settles if its token
    still stands. One that is past its deadline is ended by a reaper as soon as its worker is suspect, and may be
    retried then, whatever its `on_crash` says. On an event loop it shares a process, and is left to its worker.
    """
    ends = []
    if hold.lease_s is not None and hold.retried_elsewhere:
        ends.append(lease_end_s(confirmed_s, hold.lease_s))
    timeout_s = hold.policy.timeout_s
    if timeout_s is not None and hold.given_s and not hold.is_async:
        ends.append(max(hold.given_s + timeout_s, lease_end_s(confirmed_s, hold.unheard_s)))
    return min(ends, default=None)
