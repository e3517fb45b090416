"""What those who listen are told, and what must be known to tell them."""

import msgspec

from unstuck.domain.states import JobState


class Glance(msgspec.Struct, frozen=True):
    """Where a job stands, for somebody who follows it: a narrow look that costs next to nothing."""

    job_id: int
    state: JobState
    attempt: int
    token: int | None
    worker_id: str | None
