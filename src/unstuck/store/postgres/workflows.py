"""Keep workflows: their nodes, and what each of their jobs needs of others."""

from unstuck.store.postgres.base import Verbs


class WorkflowVerbs(Verbs):
    def _inputs(self, job_ids: list[int]) -> dict[int, bytes]:
        return {}
