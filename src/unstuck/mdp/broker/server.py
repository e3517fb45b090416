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
from unstuck.mdp.broker.handed_out import HandedOut, Heir, digest_of
from unstuck.mdp.broker.ledger_thread import LedgerThread
from unstuck.mdp.broker.outbox import DroppedMessages
from unstuck.mdp.broker.socket_loop import SocketLoop, give_back, open_router, watch_connections
from unstuck.mdp.curve import check_place, secured
from unstuck.metrics.counters import Counters
from unstuck.notify.wakeups import WakeupListener
from unstuck.recovery.reap import Reaper
from unstuck.runner.status_page import status_page_folder
from unstuck.worker.registration import new_worker_id

SWITCH_S = 0.0005
"""The socket and the ledger have a thread each, and hand over to each other all the time."""
STOP_S = 5.0
REPLIES_S = 1.0
"""For what old workers have in hand that work on small things. Who takes longer is unlikely to say it just then."""

log = logger("unstuck.mdp.broker")


class _End:
    """Told by a signal that all must end, whichever loop is running."""

    def __init__(self) -> None:
        self.is_asked = False
        self.loop: SocketLoop | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self.loop is not None:
            self.loop.stop()


def run_broker(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `ready` is told the address."""
    check_place(settings.mdp)
    with ExitStack() as stack:
        ledger = ready_ledger(settings)
        stack.callback(ledger.close)
        counters = Counters()
        end = _End()
        address = ""

        def bound(at: str) -> None:
            nonlocal address
            if address:
                log.info("The socket is open again", address=at)
            else:
                # Only now: whoever ends us before must not wait for a loop that has not begun.
                for name in (signal.SIGTERM, signal.SIGINT):
                    stack.callback(signal.signal, name, signal.signal(name, end.ask))
                ready(at)
            address = at

        schedules = ScheduleWakeUps()
        if settings.mdp.reap:
            _watch(stack, settings, ledger, counters, schedules)
            metrics_writer = None
        else:
            # Without a reaper nobody else writes what was counted here.
            metrics_writer = MetricsWriter(ledger, counters, settings.recovery.heartbeat_interval_s)
            stack.callback(metrics_writer.flush)
        sys.setswitchinterval(SWITCH_S)
        while not end.is_asked:
            # What comes after the first is at the same address, where its peers come back to.
            place = replace(settings, mdp=replace(settings.mdp, bind=address or settings.mdp.bind))
            _sit(place, ledger, counters, end, bound, metrics_writer, schedules)
            give_back()


def _watch(
    stack: ExitStack, settings: Settings, ledger: Ledger, counters: Counters, schedules: ScheduleWakeUps
) -> None:
    # A ledger in memory has one connection. Any other is swept on connections of its own, so that no request waits.
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


def _sit(
    settings: Settings,
    ledger: Ledger,
    counters: Counters,
    end: _End,
    bound: Callable[[str], None],
    metrics_writer: MetricsWriter | None,
    schedules: ScheduleWakeUps,
) -> None:
    """Serve with one socket, until the end or until it holds too much. The next one is to its peers what a broker is
    that was started again."""
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        router = open_router(context, settings.mdp)
        # Whatever refuses to go on below: a context ends only when its sockets are closed.
        stack.callback(router.close)
        monitor = watch_connections(router)
        stack.callback(monitor.close, 0)
        stack.enter_context(secured(context, router, settings.mdp))
        address = _bind(router, settings.mdp.bind)
        batch_runner = BatchRunner(ledger, settings, Reaper(ledger, settings.recovery, by=BY, counters=counters))
        stack.callback(batch_runner.close)
        digest = digest_of(settings.url)
        handed = HandedOut.create(status_page_folder(), digest, address)
        stack.callback(handed.close)
        heir = Heir(status_page_folder(), digest, address)
        stack.callback(heir.leave)
        core = BrokerCore(settings.mdp, new_worker_id, time.time, handed, heir.find, DroppedMessages(counters))
        loop = SocketLoop(router, monitor, core, lambda batch: ledger_thread.send(batch), settings.mdp)
        stack.callback(loop.close)
        ledger_thread = LedgerThread(batch_runner, loop.answered, loop.failed, metrics_writer)
        ledger_thread.start()

        def heard(words: frozenset[str]) -> None:
            schedules.heard(words)
            loop.heard(words)

        listener = WakeupListener(lambda: ledger, heard, lambda: schedules.kick())
        listener.start()
        stack.callback(listener.stop)
        bound(address)
        end.loop = loop
        if end.is_asked:
            loop.stop()
        loop.run()
        if loop.is_too_heavy:
            log.warning(
                "The socket holds more than it may, and begins afresh. Peers that share a routing id, or never end a "
                "message, leave what they said in it",
                max_memory_bytes=settings.mdp.max_memory_bytes,
            )
        _say_goodbye(core, loop, ledger_thread)


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


def _say_goodbye(core: BrokerCore, loop: SocketLoop, ledger_thread: LedgerThread) -> None:
    """Send idle workers away in order. Those that work on go on: their replies find the next broker."""
    core.close()
    begun_s = time.monotonic()
    while (passed_s := time.monotonic() - begun_s) < STOP_S and (
        core.busy_with_ledger or (core.awaits_replies and passed_s < REPLIES_S)
    ):
        loop.step()
    ledger_thread.stop(STOP_S)
