"""What both sides of the broker stand on: who is there, who waits, what goes out and what is to be written."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from unstuck.config import MdpSettings
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import RemoteHeartbeat
from unstuck.logs import logger
from unstuck.mdp.broker.backlog import Backlog
from unstuck.mdp.broker.batch import Batch, WorkerDeath, WorkerTurn
from unstuck.mdp.broker.deferred import Deferred
from unstuck.mdp.broker.handed_out import AbandonedWorker, HandedOut
from unstuck.mdp.broker.notifications import Notifications, Subscriptions
from unstuck.mdp.broker.peer_limits import ReadyLimit, ReturnedJobs
from unstuck.mdp.broker.request_addresses import new_key
from unstuck.mdp.broker.requests import RequestTable
from unstuck.mdp.broker.worker_table import ConnectedWorker, WorkerTable
from unstuck.metrics.catalogue import MDP_DROPPED
from unstuck.metrics.counters import Counters

SAY_EVERY_S = 60.0
"""How often the log says at most that messages of one kind were dropped."""

log = logger("unstuck.mdp")


class DroppedMessages:
    """The reasons are a few sentences of ours: no peer can make up another one."""

    def __init__(self, counters: Counters | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self._said: dict[str, tuple[float, int]] = {}
        """By reason: when the log last said it, and how many there were then."""

    def add(self, why: str) -> None:
        self.counts[why] += 1
        if self._counters is not None:
            self._counters.add(MDP_DROPPED, (why,))
        now_s = self._clock()
        at_s, before = self._said.get(why, (-SAY_EVERY_S, 0))
        if now_s - at_s >= SAY_EVERY_S:
            count = self.counts[why]
            self._said[why] = (now_s, count)
            log.warning("Messages were dropped", why=why, messages=count - before, in_all=count)


class Send(NamedTuple):
    to: bytes
    frames: list[bytes]


class Outbox:
    """`new_id`, `new_key` and `wall` are given, so that a simulation can repeat itself."""

    def __init__(
        self,
        settings: MdpSettings,
        new_id: Callable[[], str],
        wall_clock: Callable[[], float],
        handed: HandedOut | None = None,
        find_abandoned: Callable[[], Iterable[AbandonedWorker]] = tuple,
        dropped: DroppedMessages | None = None,
        new_key: Callable[[], str] = new_key,
    ) -> None:
        self._settings = settings
        # Read once: a setting is parsed each time it is asked for.
        self._interval_s = settings.heartbeat_interval_s
        self._timeout_s = settings.heartbeat_timeout_s
        self._busy_timeout_s = settings.busy_timeout_s
        self._ttl_s = settings.request_ttl_s
        self._new_id = new_id
        self._new_key = new_key
        self._run_id = new_id()
        self._request_count = 0
        self._wall_clock = wall_clock
        self.workers = WorkerTable()
        self.requests = RequestTable()
        self.subscriptions = Subscriptions()
        self.notifications = Notifications(settings.crash_notification_delay_ms / 1000)
        self.tasks: dict[str, TaskRecord] = {}
        self.dropped = dropped or DroppedMessages()
        self._batch = Batch()
        self._backlog = Backlog()
        self._find_abandoned = find_abandoned
        self._left_working: list[tuple[float, AbandonedWorker]] = []
        """Old workers that had a request when their broker died, and since when we know that."""
        self.all_have_spoken = False
        """Every peer that is connected has said something, so that none of them is silent because it works."""
        self._handed_out = handed or HandedOut()
        self._ready_limit = ReadyLimit()
        self._deferred = Deferred()
        self._returned_jobs = ReturnedJobs()
        self._unknown_heartbeats: set[bytes] = set()
        """Strangers that beat since the last tick, and were sent away for it."""
        self._in_flight: Batch | None = None
        self._batch_sent_s = float("inf")
        """When that was sent."""
        self._sends: list[Send] = []
        self._departed: dict[str, WorkerDeath | None] = {}
        """Who left while a job was looked for on its behalf: that one goes back first. None left in order."""
        self._quick: set[str] = set()
        """Workers that are given more than one job at a time."""
        self._gone: set[bytes] = set()
        """Clients that went while what they asked for was on its way to the ledger."""
        self._gather_until_s: float | None = None
        """Until then more is gathered for the next order."""
        self._heartbeat_s = 0.0
        self._closing = False

    def _heartbeat_of(self, worker: ConnectedWorker) -> RemoteHeartbeat:
        settled, worker.settled = worker.settled, 0
        return RemoteHeartbeat(worker.worker_id, running=int(worker.assignment is not None), settled=settled)

    def _queue(self, service: str) -> str:
        known = self.tasks.get(service)
        return service if known is None else known.queue

    def _worker_turn(self, worker_id: str) -> WorkerTurn:
        return self._batch.worker_turns.setdefault(worker_id, WorkerTurn())

    def _send_to_worker(self, worker: ConnectedWorker, message: list[bytes], now_s: float) -> None:
        worker.sent_s = now_s
        self._send(worker.identity, message)

    def _send(self, to: bytes, message: list[bytes]) -> None:
        self._sends.append(Send(to, message))
