"""How much the operator's verbs take at a time, and what they take where nothing is said."""

from unstuck.domain.states import FINAL, JobState

# Ids are bigint on every ledger; a larger number cannot be a job.
MAX_JOB_ID = 2**63 - 1
PAGE = 1_000
EVENTS_SHOWN = 200
LOOKED_UP = 20  # Whom to wake is looked up for so many jobs; for more, everybody is woken.
MAX_REASON_CHARS = 500
RETRIED_BY_DEFAULT = (JobState.FAILED, JobState.QUARANTINED)
CANCELLED_BY_DEFAULT = tuple(state for state in JobState if state not in FINAL)
