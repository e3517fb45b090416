"""Know how long this watchman itself has been awake and in touch: who slept must not accuse others of silence."""

from enum import StrEnum


class Since(StrEnum):
    """Why the present stretch of attention began when it did."""

    START = "start"
    PAUSE = "pause"
    """The process was frozen, or starved, or the machine slept."""
    OUTAGE = "outage"
    """The ledger could not be reached from here."""


class Attention:
    """The watchman's own record. Times are boot-time seconds, given by the caller."""

    def __init__(self, now_s: float) -> None:
        self.since = Since.START
        self.late = False
        self._began_s = now_s
        self._lost_s: float | None = None
        self._confirmed = False

    def tick(self, now_s: float, due_s: float, tolerance_s: float) -> None:
        """Note that a round begins now which was due at `due_s`."""
        self.late = now_s - due_s > tolerance_s
        if self.late:
            self._begin(Since.PAUSE, now_s)

    def lost(self, now_s: float) -> None:
        """Note that the ledger does not answer."""
        if self._lost_s is None:
            self._lost_s = now_s

    def reached(self, now_s: float, tolerance_s: float) -> None:
        """Note that the ledger answers (again)."""
        if self._lost_s is not None and now_s - self._lost_s > tolerance_s:
            self._begin(Since.OUTAGE, now_s)
        self._lost_s = None

    @property
    def awake(self) -> bool:
        """False in the first round after a pause or a failure: it accuses nobody by silence."""
        return not self.late and self._lost_s is None

    def attentive_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def may_accuse(self, now_s: float, *, timeout_s: float, most: bool) -> bool:
        """Say whether a worker that was silent for `timeout_s` may be accused of it now.

        Half a timeout is at least one heartbeat interval, by the check on settings: enough for everyone who
        lives to be heard once. After an outage of our own everyone gets a full one. At the start only the
        silence of most workers at once is suspicious: then it may be the road to the ledger that was cut."""
        if not self.awake:
            return False
        match self.since:
            case Since.START:
                needed_s = timeout_s / 2 if most and not self._confirmed else 0.0
            case Since.PAUSE:
                needed_s = timeout_s / 2
            case Since.OUTAGE:
                needed_s = timeout_s
        return self.attentive_s(now_s) >= needed_s

    def may_miss_sessions(self, now_s: float, *, grace_s: float) -> bool:
        """Say whether a missing database session means anything yet."""
        if not self.awake:
            return False
        return self.since is Since.START or self.attentive_s(now_s) >= grace_s

    def confirm(self) -> None:
        """Note that somebody looked twice: the silence of most is then believed at once."""
        self._confirmed = True

    def _begin(self, since: Since, now_s: float) -> None:
        # A pause inside the amnesty of an outage must not shorten it.
        if since is Since.OUTAGE or self.since is not Since.OUTAGE:
            self.since = since
        self._began_s = now_s
