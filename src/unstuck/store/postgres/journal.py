"""Keep what jobs write down on their way, and the signals that they are sent."""

from unstuck.store.postgres.base import Verbs


class JournalVerbs(Verbs):
    def _journals(self, job_ids: list[int]) -> dict[int, bytes]:
        return {}
