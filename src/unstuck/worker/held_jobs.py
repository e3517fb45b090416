"""The jobs that this worker holds, from the claim to the settled end, and their policies."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from unstuck.domain.autopsy import DeathKind, ProgressMark
from unstuck.domain.endings import Attempt, Outcome
from unstuck.domain.policy import Policy, decode_policy
from unstuck.ledger.contract.workers import Claimed
from unstuck.runner.messages import JobMessage


@dataclass(slots=True, eq=False)
class Stop:
    """Why we end a job ourselves, and how far that has got."""

    outcome: Outcome
    """The outcome of the job once it has really ended."""
    kind: DeathKind
    begun_s: float = 0.0
    stack_until_s: float = 0.0
    """Until when to wait for its stack before anything else is done; 0 if not, or no longer."""
    kill_at_s: float = 0.0
    """When to kill the runner; 0 if another job's stop will kill it."""
    actions: list[str] = field(default_factory=list)
    """What was done to end it, in words, for its autopsy."""
    sigterms: int = 0


@dataclass(slots=True, eq=False)
class HeldJob:
    job: Claimed
    policy: Policy
    is_async: bool
    lease_s: float | None
    """How long it may live without a confirmed beat; None: for ever (`heartbeat=False`)."""
    queued_s: float
    """When it came into our hands, or was last waiting for a slot again."""
    sent_s: float = 0.0
    """When a runner got it; 0 before."""
    stop: Stop | None = None
    cancel_requested: bool = False
    last_heartbeat_s: float = 0.0
    """Its last `ctx.heartbeat()` or `ctx.progress()`; 0 before the first."""
    progress: ProgressMark | None = None
    silent_since_s: float = 0.0
    """Since when no Python code ran in its process, where that is long enough to be told; else 0."""
    unreported: bool = False
    """Its progress, or its silence, is not told to the ledger yet."""
    unheard_s: float = math.inf
    """How long its worker may be silent before it is suspect."""
    journal_pending: int = 0
    """So many of its entries wait to be written: it waits for the ledger, and is not stalled."""

    @property
    def token(self) -> int:
        return self.job.token

    @property
    def retries_on_crash(self) -> bool:
        return self.policy.on_crash == "retry"

    @property
    def run_alone(self) -> bool:
        """It may have killed a process that it shared: it gets one of its own. A sync job always does."""
        return self.is_async and self.job.run_alone

    def attempt(self) -> Attempt:
        job = self.job
        return Attempt(
            job.job_id, job.token, self.policy, job.failures, job.crashes, self.cancel_requested, job.suspected_crashes
        )

    def frame(self) -> JobMessage:
        job = self.job
        facts = (job.token, job.job_id, job.task, job.queue, job.payload, job.payload_type, job.attempt, job.crashes)
        return JobMessage(*facts, job.inputs, job.journal)


MAX_POLICIES_KEPT = 1_000


class PolicyCache:
    def __init__(
        self,
        stale_after_s: float,
        async_tasks: frozenset[str],
        shorten_interval: Callable[[float], None],
        suspect_after_s: float = math.inf,
    ) -> None:
        self._stale_after_s = stale_after_s
        self._suspect_after_s = min(stale_after_s, suspect_after_s)
        self._async_tasks = async_tasks
        self._shorten_interval = shorten_interval
        self._known: dict[bytes, tuple[Policy, float | None]] = {}

    def hold(self, job: Claimed, now_s: float) -> HeldJob:
        """Take a job in hand, with its policy and how long it may live without a confirmed beat."""
        known = self._known.get(job.policy)
        if known is None:
            known = self._read(job.policy)
        policy, lease_s = known
        unheard_s = self._suspect_after_s if lease_s is None else min(lease_s, self._suspect_after_s)
        return HeldJob(job, policy, job.task in self._async_tasks, lease_s, now_s, unheard_s=unheard_s)

    def _read(self, stored: bytes) -> tuple[Policy, float | None]:
        policy = decode_policy(stored)
        lease_s = (policy.heartbeat_timeout_s or self._stale_after_s) if policy.heartbeat else None
        if len(self._known) >= MAX_POLICIES_KEPT:
            self._known.clear()
        self._known[stored] = policy, lease_s
        if lease_s is not None:
            # Newer code may ask more of a job than our own app does.
            self._shorten_interval(lease_s / 2)
        return policy, lease_s


MAX_KEPT = 20_000
"""Older ones are forgotten. A failover takes seconds, and a busy worker ends a few thousand jobs in that time."""


class Begun:
    def __init__(self) -> None:
        self._tokens: dict[int, None] = {}

    def add(self, token: int) -> None:
        """Note that a runner got this attempt: its code may have begun."""
        self._tokens[token] = None
        if len(self._tokens) > MAX_KEPT:
            del self._tokens[next(iter(self._tokens))]

    def discard(self, token: int) -> None:
        """Note that it came back, and its code never began."""
        self._tokens.pop(token, None)

    def __contains__(self, token: int) -> bool:
        return token in self._tokens
