"""Run a broker: its socket, its ledger thread, wake-ups and the reaper, and shut them down in order."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import FrameType

import zmq

from unstuck.config import IN_MEMORY, Settings
from unstuck.errors import ConfigError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.ledger.open import ready_ledger
from unstuck.logs import logger
from unstuck.maintenance.background import BackgroundReaper, own_connections
from unstuck.maintenance.service import ScheduleWakeUps
from unstuck.mdp.broker.batch_runner import BY, BatchRunner
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.handed_out import DeadBrokers, HandedOut, digest_of
from unstuck.mdp.broker.ledger_thread import LedgerThread
from unstuck.mdp.broker.memory_watch import release_memory
from unstuck.mdp.broker.outbox import DroppedMessages
from unstuck.mdp.broker.socket_loop import SocketLoop, open_router, watch_connections
from unstuck.mdp.curve import check_place, secured
from unstuck.metrics.counters import Counters
from unstuck.notify.wakeups import WakeupListener
from unstuck.recovery.reap import Reaper
from unstuck.runner.status_page import status_page_folder
from unstuck.worker.registration import new_worker_id

SWITCH_S = 0.0005
"""Thread switch interval. The socket thread and the ledger thread wait for each other all the time."""
STOP_S = 5.0
REPLIES_S = 1.0
"""How long a shutdown waits for replies of old workers. A job that takes longer is unlikely to end just then."""

log = logger("unstuck.mdp.broker")


class _StopSignal:
    """Stops the running loop, and any further one, on a signal."""

    def __init__(self) -> None:
        self.is_asked = False
        self.loop: SocketLoop | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self.loop is not None:
            self.loop.stop()


def run_broker(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until a signal. `ready` is called with the address."""
    check_place(settings.mdp)
    with ExitStack() as stack:
        ledger = ready_ledger(settings)
        stack.callback(ledger.close)
        counters = Counters()
        end = _StopSignal()
        address = ""

        def bound(at: str) -> None:
            nonlocal address
            if address:
                log.info("The socket is open again", address=at)
            else:
                # Only now, since a signal before that must not wait for a loop that has not started.
                for name in (signal.SIGTERM, signal.SIGINT):
                    stack.callback(signal.signal, name, signal.signal(name, end.ask))
                ready(at)
            address = at

        schedules = ScheduleWakeUps()
        if settings.mdp.reap:
            _start_reaper(stack, settings, ledger, counters, schedules)
            metrics_writer = None
        else:
            # Without a reaper, no other thread writes these counters.
            metrics_writer = MetricsWriter(ledger, counters, settings.recovery.heartbeat_interval_s)
            stack.callback(metrics_writer.flush)
        sys.setswitchinterval(SWITCH_S)
        while not end.is_asked:
            # Further sockets have the address of the first, to which peers reconnect.
            place = replace(settings, mdp=replace(settings.mdp, bind=address or settings.mdp.bind))
            _serve(place, ledger, counters, end, bound, metrics_writer, schedules)
            release_memory()


def _start_reaper(
    stack: ExitStack, settings: Settings, ledger: Ledger, counters: Counters, schedules: ScheduleWakeUps
) -> None:
    # A ledger in memory has one connection. For any other, the reaper has its own, so that no request waits for it.
    shared = settings.url == IN_MEMORY
    reaper = BackgroundReaper(
        lambda: nullcontext(ledger) if shared else own_connections(settings),
        settings.recovery,
        by=BY,
        counters=counters,
        wakeups=schedules,
    )
    reaper.start()
    stack.callback(reaper.join)
    stack.callback(reaper.stop)


def _serve(
    settings: Settings,
    ledger: Ledger,
    counters: Counters,
    end: _StopSignal,
    bound: Callable[[str], None],
    metrics_writer: MetricsWriter | None,
    schedules: ScheduleWakeUps,
) -> None:
    """Serve with one socket until the end, or until it uses too much memory. To peers, the next socket looks like a
    restarted broker."""
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        router = open_router(context, settings.mdp)
        # For any error below, since a context ends only after its sockets are closed.
        stack.callback(router.close)
        monitor = watch_connections(router)
        stack.callback(monitor.close, 0)
        stack.enter_context(secured(context, router, settings.mdp))
        address = _bind(router, settings.mdp.bind)
        batch_runner = BatchRunner(ledger, settings, Reaper(ledger, settings.recovery, by=BY, counters=counters))
        stack.callback(batch_runner.close)
        digest = digest_of(settings.url)
        handed_out = HandedOut.create(status_page_folder(), digest, address)
        stack.callback(handed_out.close)
        dead_brokers = DeadBrokers(status_page_folder(), digest, address)
        stack.callback(dead_brokers.leave)
        core = BrokerCore(
            settings.mdp, new_worker_id, time.time, handed_out, dead_brokers.find, DroppedMessages(counters)
        )
        loop = SocketLoop(router, monitor, core, lambda batch: ledger_thread.send(batch), settings.mdp)
        stack.callback(loop.close)
        ledger_thread = LedgerThread(batch_runner, loop.on_batch_done, loop.on_error, metrics_writer)
        ledger_thread.start()

        def heard(topics: frozenset[str]) -> None:
            schedules.heard(topics)
            loop.on_wakeup(topics)

        listener = WakeupListener(lambda: ledger, heard, lambda: schedules.kick())
        listener.start()
        stack.callback(listener.stop)
        bound(address)
        end.loop = loop
        if end.is_asked:
            loop.stop()
        loop.run()
        if loop.is_over_memory:
            log.warning(
                "The socket holds more than it may, and begins afresh. Peers that share a routing id, or never end a "
                "message, leave what they said in it",
                max_memory_bytes=settings.mdp.max_memory_bytes,
            )
        _shut_down(core, loop, ledger_thread)


def _bind(router: "zmq.Socket[bytes]", bind: str) -> str:
    bind = f"{bind[:-2]}:*" if bind.startswith("tcp://") and bind.endswith(":0") else bind
    try:
        router.bind(bind)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"Cannot listen on {bind}: {error.strerror}. Choose another with --bind (tcp://127.0.0.1:0: any free port)."
        ) from error
    endpoint = router.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def _shut_down(core: BrokerCore, loop: SocketLoop, ledger_thread: LedgerThread) -> None:
    """Disconnect idle workers. Busy ones go on, and their replies reach the next broker."""
    core.close()
    begun_s = time.monotonic()
    while (passed_s := time.monotonic() - begun_s) < STOP_S and (
        core.busy_with_ledger or (core.awaits_replies and passed_s < REPLIES_S)
    ):
        loop.step()
    ledger_thread.stop(STOP_S)
