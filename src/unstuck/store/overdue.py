"""How long a job may run past its deadline before somebody else ends it; the same on every database."""

OVERDUE_GRACE_S = 30.0
"""How long past the deadline a worker that seems well may take to end its job itself."""
OVERDUE_LOST_GRACE_S = 2.0
"""The same for a worker that is suspect or dead."""
