"""Read the rules that came with a job, once for all jobs under the same ones: few tasks, few policies."""

import math
from collections.abc import Callable

from unstuck.domain.policy import Policy, decode_policy
from unstuck.store.records import Claimed
from unstuck.worker.holds import Hold

MAX_TERMS_KEPT = 1_000


class Terms:
    def __init__(
        self,
        stale_after_s: float,
        async_tasks: frozenset[str],
        quicken: Callable[[float], None],
        suspect_after_s: float = math.inf,
    ) -> None:
        self._stale_after_s = stale_after_s
        self._suspect_after_s = min(stale_after_s, suspect_after_s)
        self._async_tasks = async_tasks
        self._quicken = quicken
        self._known: dict[bytes, tuple[Policy, float | None]] = {}

    def hold(self, job: Claimed, now_s: float) -> Hold:
        """Take a job in hand, with its policy and how long it may live without a confirmed beat."""
        terms = self._known.get(job.policy)
        if terms is None:
            terms = self._read(job.policy)
        policy, lease_s = terms
        unheard_s = self._suspect_after_s if lease_s is None else min(lease_s, self._suspect_after_s)
        return Hold(job, policy, job.task in self._async_tasks, lease_s, now_s, unheard_s=unheard_s)

    def _read(self, stored: bytes) -> tuple[Policy, float | None]:
        policy = decode_policy(stored)
        lease_s = (policy.heartbeat_timeout_s or self._stale_after_s) if policy.heartbeat else None
        if len(self._known) >= MAX_TERMS_KEPT:
            self._known.clear()
        self._known[stored] = policy, lease_s
        if lease_s is not None:
            # Newer code may ask more of a job than our own app does.
            self._quicken(lease_s / 2)
        return policy, lease_s
