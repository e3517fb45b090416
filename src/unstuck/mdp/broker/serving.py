"""Run a broker: the socket, the clerk, the ear and the watchman, and an end in order."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import zmq

from unstuck.config import IN_MEMORY, Settings
from unstuck.domain.errors import ConfigError
from unstuck.mdp.broker.clerk import Clerk
from unstuck.mdp.broker.core import Broker
from unstuck.mdp.broker.desk import BY, Desk
from unstuck.mdp.broker.loop import Loop, open_router
from unstuck.mdp.security import check_place, secured
from unstuck.metrics.tallies import Tallies
from unstuck.notify.ear import Ear
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.watchman import Watchman
from unstuck.store.bookkeeping import Bookkeeper
from unstuck.store.opening import ready_ledger
from unstuck.worker.identity import new_worker_id

SWITCH_S = 0.0005
"""The socket and the ledger have a thread each, and hand over to each other all the time."""
STOP_S = 5.0


def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `ready` is told the address."""
    check_place(settings.mdp)
    with ExitStack() as stack:
        ledger = ready_ledger(settings)
        stack.callback(ledger.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        router = open_router(context, settings.mdp)
        # Whatever refuses to go on below: a context ends only when its sockets are closed.
        stack.callback(router.close)
        stack.enter_context(secured(context, router, settings.mdp))
        address = _bind(router, settings.mdp.bind)
        tallies = Tallies()
        if settings.mdp.reap:
            watch = ledger
            if settings.url != IN_MEMORY:
                # On connections of its own: a look at ten thousand workers must not stand before anybody's request.
                watch = ready_ledger(settings)
                stack.callback(watch.close)
            watchman = Watchman(
                Reaper(watch, settings.recovery, by=BY, tallies=tallies),
                Bookkeeper(watch, tallies, settings.recovery.heartbeat_interval_s),
            )
            watchman.start()
            stack.callback(watchman.join)
            stack.callback(watchman.stop)
        desk = Desk(ledger, settings, Reaper(ledger, settings.recovery, by=BY, tallies=tallies))
        stack.callback(desk.close)
        core = Broker(settings.mdp, new_worker_id, time.time)
        loop = Loop(router, core, lambda order: clerk.send(order), settings.mdp)
        stack.callback(loop.close)
        clerk = Clerk(desk, loop.answered, loop.failed)
        clerk.start()
        ear = Ear(lambda: ledger, loop.heard)
        ear.start()
        stack.callback(ear.stop)
        before = {name: signal.signal(name, _stopper(loop)) for name in (signal.SIGTERM, signal.SIGINT)}
        try:
            sys.setswitchinterval(SWITCH_S)
            ready(address)
            loop.run()
            _say_goodbye(core, loop, clerk)
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


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


def _stopper(loop: Loop) -> Callable[[int, FrameType | None], None]:
    return lambda number, frame: loop.stop()


def _say_goodbye(core: Broker, loop: Loop, clerk: Clerk) -> None:
    """Send idle workers away in order. Those that work go on: their replies find the next broker."""
    core.leave()
    until_s = time.monotonic() + STOP_S
    while core.busy_with_ledger and time.monotonic() < until_s:
        loop.round()
    clerk.stop(STOP_S)
