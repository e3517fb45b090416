"""A Majordomo worker: a function that serves, and a thread that sends heartbeats meanwhile."""

import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from unstuck.errors import ConfigError
from unstuck.host import hostname
from unstuck.logs import logger
from unstuck.mdp.connection import CurveKeys
from unstuck.mdp.protocol import frame_of
from unstuck.mdp.services import Function, Services
from unstuck.mdp.worker_thread import LIVENESS, Job, WorkerOptions, WorkerThread

log = logger("unstuck.mdp.worker")

DEFAULT_HEARTBEAT_S = 2.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Serve what clients ask for: `Worker(endpoint, "echo", function).run()`, or several services by name.

    A function gets the list of the body's frames, and with a parameter `call` also what it works on. It gives bytes, a
    list of bytes, or a value that is sent as CBOR. `plain=True` is for a broker that is not ours: the worker speaks
    Majordomo 0.1 and nothing else."""

    def __init__(
        self,
        endpoint: str,
        services: str | Mapping[str, Function],
        function: Function | None = None,
        *,
        name: str | None = None,
        heartbeat: float = DEFAULT_HEARTBEAT_S,
        metadata: Mapping[str, Any] | None = None,
        plain: bool = False,
        curve: CurveKeys | None = None,
    ) -> None:
        self._services = Services(_map_of(services, function))
        if isinstance(heartbeat, bool) or not isinstance(heartbeat, int | float) or not heartbeat > 0:
            raise ConfigError(f"heartbeat is a number of seconds above zero, not {heartbeat!r}.")
        if plain and len(self._services.services) > 1:
            raise ConfigError("A worker of plain 0.1 serves one service: start one worker for each.")
        frame_of(dict(metadata or {}))  # Raises now what would be raised in another thread.
        self._is_named = bool(name)
        self._terms = WorkerOptions(
            endpoint=endpoint,
            services=self._services.names,
            name=name or "",
            metadata=dict(metadata or {}),
            heartbeat_s=float(heartbeat),
            plain=plain,
            keys=curve,
        )
        # No `threading.Event`: a signal handler that sets one may wait for a lock of the thread that it interrupted.
        self._is_stopping = False
        self._thread: WorkerThread | None = None

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop()`: then the present call is finished and the broker told goodbye."""
        if not self._is_named:
            # Made here, since a process may be forked before. Containers may have one host name and one process id.
            own = f"{hostname()}-{os.getpid()}-{secrets.token_hex(2)}"
            self._terms = replace(self._terms, name=own)
        thread = self._thread = WorkerThread(self._terms)
        with self._heeding_signals():
            thread.start()
            try:
                while not self._is_stopping and (task := thread.tasks.get()) is not None:
                    if not self._is_stopping and thread.begin(task):
                        self._work(thread, task)
            finally:
                thread.leave(LIVENESS * self._terms.heartbeat_s)
        if thread.failure is not None:
            raise thread.failure

    def stop(self) -> None:
        """Ask it to end, from any thread or signal handler; `run()` returns when the present call is finished."""
        self._is_stopping = True
        if self._thread is not None:
            self._thread.draining = True
            self._thread.tasks.put(None)

    def _work(self, thread: WorkerThread, task: Job) -> None:
        outcome, error = self._services.work(task.order, thread.say_progress)
        if error is not None:
            log.error("The function of a service raised", exc_info=error, worker=self._terms.name)
        thread.hand_in(task, outcome)

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._is_stopping:
            raise KeyboardInterrupt  # Somebody does not want to wait for the present call.
        self.stop()


def _map_of(services: str | Mapping[str, Function], function: Function | None) -> dict[str, Function]:
    match services, function:
        case str() as name, function if function is not None:
            return {name: function}
        case Mapping() as several, None:
            return dict(several)
    raise ConfigError('Give a service and its function, or a map of them: Worker(endpoint, "echo", function).')
