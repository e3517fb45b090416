"""The thread that keeps a worker at its post: it beats while the function works, and comes back when the broker was
away."""

import os
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import cbor2
import zmq

from unstuck.errors import ConfigError, NameTaken
from unstuck.host import hostname
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.mdp import protocol
from unstuck.mdp.connection import CurveKeys, DealerConnection
from unstuck.mdp.protocol import Assignment, Disconnect, Heartbeat, hear_as_worker, map_of
from unstuck.mdp.services import Outcome, Returned, is_unstuck_address

log = logger("unstuck.mdp.worker")

LIVENESS = 3
SOON_S = 0.05
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 32.0
NAME_PATIENCE_S = 30.0
"""How long to ask for a name that another worker has: that may be this one before a restart, not yet given up."""
LINGER_MS = 2_000
BEATS_THAT_CONFIRM = 2
"""So many beats after an outcome the broker has it: the first may have been on its way already."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker says of itself, and how."""

    endpoint: str
    services: list[bytes]
    name: str
    metadata: dict[str, Any]
    heartbeat_s: float
    plain: bool
    keys: CurveKeys | None


@dataclass(frozen=True)
class Job:
    """An order, with the number of the connection that it came by."""

    order: Assignment
    connection: int


@dataclass(frozen=True)
class Finished:
    """What came of a task, on its way to the broker."""

    task: Job
    outcome: Outcome


class WorkerThread:
    """`tasks` is for the worker's main thread: orders, and None when there is nothing more to wait for."""

    def __init__(self, terms: WorkerOptions) -> None:
        self.tasks: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.draining = False
        """Set by a signal handler, so it is a flag and nothing else."""
        self._terms = terms
        self._mailbox = Mailbox()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = threading.Lock()
        self._connection = 0
        self._held: Job | None = None
        self._undelivered: Finished | None = None
        self._unconfirmed: Finished | None = None
        self._beats_since = 0
        self._leave_at_s: float | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._was_healthy = True
        self._has_answered = False
        """The broker said something after READY, so it understood it."""
        self._must_start_over = False
        self._instance = secrets.token_bytes(16)
        self._refused_since_s: float | None = None
        """Since when another worker has our name."""
        self._thread = threading.Thread(target=self._run, name="unstuck-mdp-worker", daemon=True)

    # For the worker's main thread ---------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def begin(self, task: Job) -> bool:
        """Take a task up, unless the connection that it came by is gone: then the broker gave it to somebody else."""
        with self._guard:
            if task.connection != self._connection:
                return False
            self._held = task
            return True

    def hand_in(self, task: Job, outcome: Outcome) -> None:
        self._mailbox.post(Finished(task, outcome))

    def say_progress(self, address: bytes, about: dict[str, Any]) -> None:
        self._mailbox.post(protocol.worker_processes(address, cbor2.dumps(about)))

    def leave(self, patience_s: float) -> None:
        """Say goodbye, after the last outcome; with a broker that is away it waits for so long."""
        self._mailbox.post(patience_s)
        self._thread.join()

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._attend()
                self._rest()
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.failure = error
        finally:
            if self._undelivered is not None:
                log.warning("The broker is away: an outcome could not be handed in", endpoint=self._terms.endpoint)
            self._context.destroy(linger=LINGER_MS)
            self._mailbox.close()
            self.tasks.put(None)

    def _attend(self) -> None:
        """Serve until the connection is over, for whatever reason."""
        connection = DealerConnection(self._context, self._terms.endpoint, self._terms.keys)
        connection.watch(self._mailbox.fileno())
        linger_ms = 0
        try:
            if not self._wait_for_broker(connection):
                return
            self._must_start_over = self._was_healthy = self._has_answered = False
            self._sign_on(connection)
            beat_at_s = heard_at_s = time.monotonic()
            beat_at_s += self._terms.heartbeat_s
            while True:
                connection.wait(self._sooner(beat_at_s - time.monotonic()))
                is_lost = False in connection.changes()
                now_s = time.monotonic()
                while (heard := connection.receive()) is not None:
                    heard_at_s = now_s
                    if not self._hear(heard):
                        return
                if is_lost:
                    log.info("The connection to the broker is lost", endpoint=self._terms.endpoint)
                    self._suspect_plain_broker()
                    return
                if self._read_mailbox(connection):
                    heard_at_s = now_s
                if self._leave_at_s is not None or self._must_start_over:
                    connection.send(protocol.disconnect())
                    linger_ms = LINGER_MS
                    return
                if now_s >= beat_at_s:
                    connection.send(protocol.heartbeat())
                    beat_at_s = now_s + self._terms.heartbeat_s
                # Plain brokers send heartbeats only to idle workers, so one that works hears nothing.
                if self._terms.plain and self._held is not None:
                    heard_at_s = now_s
                if now_s - heard_at_s > LIVENESS * self._terms.heartbeat_s:
                    log.warning("The broker is silent: connecting again", endpoint=self._terms.endpoint)
                    self._suspect_plain_broker()
                    return
        finally:
            with self._guard:
                # What came by it and was not begun is the broker's again.
                self._connection += 1
            connection.close(linger_ms)

    def _wait_for_broker(self, connection: DealerConnection) -> bool:
        """Wait until the broker is there. Return False if the worker ends first."""
        while True:
            if self._is_over():
                return False
            if connection.changes()[-1:] == [True]:
                return True
            connection.wait(self._sooner(None))
            self._read_mailbox(None)

    def _sign_on(self, connection: DealerConnection) -> None:
        if not self._terms.plain and self._undelivered is None and self._held is None:
            # It was sent, and may have been lost with the connection. If not, its token is spent, and it is refused.
            self._undelivered = self._unconfirmed
        self._unconfirmed = None
        connection.send(protocol.worker_ready(self._terms.services, b"" if self._terms.plain else self._about()))
        self._deliver(connection)

    def _about(self) -> bytes:
        about: dict[str, Any] = {
            "name": self._terms.name,
            "instance": self._instance,
            "metadata": self._terms.metadata,
            "pid": os.getpid(),
            "host": hostname(),
        }
        task = self._undelivered.task if self._undelivered is not None else self._held
        if task is not None:
            about["holding"] = task.order.address
        return cbor2.dumps(about)

    def _hear(self, heard: list[bytes]) -> bool:
        """Do what the broker says; False ends the connection."""
        match hear_as_worker(heard):
            case Assignment() as order if not (self._terms.plain or is_unstuck_address(order.address)):
                self._refuse_plain_broker(order)
            case Assignment() as order:
                self._healthy()
                self._unconfirmed = self._refused_since_s = None
                self.tasks.put(Job(order, self._connection))
            case Heartbeat():
                self._healthy()
                self._beats_since += 1
                if self._beats_since >= BEATS_THAT_CONFIRM:
                    self._unconfirmed = None
            case Disconnect(about):
                if about:
                    self._heed_refusal(about)
                log.info("The broker ended the connection", endpoint=self._terms.endpoint)
                self._suspect_plain_broker()
                return False
            case None:
                log.warning("The broker said something that makes no sense", endpoint=self._terms.endpoint)
        return True

    def _refuse_plain_broker(self, order: Assignment) -> None:
        """Let the worker end: what it says would break another broker, and its replies could reach the wrong client."""
        self.failure = ConfigError(
            f"{self._terms.endpoint} is not a broker of Unstuck: it gave work with the address {order.address!r:.80}. "
            "Start a worker for it with plain=True, one for each service."
        )
        self._leave_at_s = time.monotonic()

    def _suspect_plain_broker(self) -> None:
        if not (self._terms.plain or self._has_answered):
            log.warning(
                "The broker did not answer. If it is not a broker of Unstuck, start the worker with plain=True",
                endpoint=self._terms.endpoint,
            )

    def _heed_refusal(self, about: bytes) -> None:
        """Ask again later. Raise NameTaken if another worker has our name for long."""
        said = map_of(about) or {}
        message = str(said.get("message"))
        self._has_answered = True
        log.error("The broker refuses this worker", endpoint=self._terms.endpoint, reason=message)
        self._was_healthy = False
        if said.get("error") != protocol.NAME_TAKEN:
            return
        now_s = time.monotonic()
        self._refused_since_s = self._refused_since_s or now_s
        if now_s - self._refused_since_s >= NAME_PATIENCE_S:
            raise NameTaken(message)

    def _read_mailbox(self, connection: DealerConnection | None) -> bool:
        """Take what the main thread posted; True if an outcome was delivered."""
        delivered = False
        for message in self._mailbox.take():
            if isinstance(message, float):
                self._leave_at_s = time.monotonic() + message
            elif isinstance(message, list):
                if connection is not None and not self._terms.plain:
                    connection.send(message)
            else:
                self._undelivered = message
                delivered = connection is not None and self._deliver(connection)
        return delivered

    def _deliver(self, connection: DealerConnection) -> bool:
        finished, self._undelivered = self._undelivered, None
        if finished is None:
            return False
        with self._guard:
            if self._held is finished.task:
                self._held = None
        if not self._terms.plain:
            self._deliver_to_ours(connection, finished.outcome)
            self._unconfirmed, self._beats_since = finished, 0
        elif finished.task.connection != self._connection:
            # An address there is a client's identity, and may be somebody else's by now.
            log.warning("An outcome is dropped: the plain broker was away, and its addresses do not outlast that")
        elif isinstance(finished.outcome, Returned):
            connection.send(protocol.worker_reply(finished.outcome.address, finished.outcome.body))
        else:
            # There is no word for it in 0.1. The caller hears nothing, as if we had died, and we are free again.
            self._must_start_over = True
        return True

    def _deliver_to_ours(self, connection: DealerConnection, outcome: Outcome) -> None:
        if self.draining:
            connection.send(protocol.worker_processes(outcome.address, cbor2.dumps({"draining": True})))
        if isinstance(outcome, Returned):
            connection.send(protocol.worker_reply(outcome.address, outcome.body))
        else:
            connection.send(protocol.worker_finished(outcome.address, outcome.about))

    # Coming back --------------------------------------------------------------------------------

    def _healthy(self) -> None:
        self._was_healthy = self._has_answered = True
        self._backoff_s = FIRST_BACKOFF_S

    def _rest(self) -> None:
        """Wait before the next connection: a moment after one that was good, else longer each time."""
        wait_s = SOON_S if self._was_healthy else self._backoff_s
        if not self._was_healthy:
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        until_s = time.monotonic() + wait_s
        while not self._is_over() and (left_s := until_s - time.monotonic()) > 0:
            zmq.select([self._mailbox.fileno()], [], [], self._sooner(left_s))
            self._read_mailbox(None)

    def _is_over(self) -> bool:
        return self._leave_at_s is not None and (self._undelivered is None or time.monotonic() >= self._leave_at_s)

    def _sooner(self, wait_s: float | None) -> float | None:
        if self._leave_at_s is None:
            return wait_s
        left_s = max(0.0, self._leave_at_s - time.monotonic())
        return left_s if wait_s is None else min(left_s, wait_s)
