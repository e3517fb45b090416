"""Show what silent workers hold, and settle it by hand."""

from unstuck.client import stale
from unstuck.client.auditing import counted, silence_named
from unstuck.client.operator.base import Verbs
from unstuck.client.stale import StaleAction


class StaleVerbs(Verbs):
    """A part of the operator's verbs."""

    def stale(self, older_than_s: float = 0.0) -> list[StaleAction]:
        """List held jobs whose worker missed beats for at least so long, or is suspect or dead."""
        return stale.find_stale(self._ledger, older_than_s)

    def fail_stale(self, older_than_s: float | None = None, by: str | None = None) -> list[StaleAction]:
        """Fail stale running jobs; without a threshold each by its own timeout. Gives what was done."""
        by = by or self._by
        with self._audit.note(by, "fail_stale", silence_named(older_than_s)) as note:
            actions = stale.fail_stale(self._ledger, older_than_s, by)
            note.outcome = counted(action.action for action in actions)
        return actions

    def requeue_stale(self, older_than_s: float | None = None, by: str | None = None) -> list[StaleAction]:
        """Give stale claimed jobs back to their queues (and running ones where `on_crash="retry"` and their own
        timeout has passed). Gives what was done."""
        by = by or self._by
        with self._audit.note(by, "requeue_stale", silence_named(older_than_s)) as note:
            actions = stale.requeue_stale(self._ledger, older_than_s, by)
            note.outcome = counted(action.action for action in actions)
        return actions
