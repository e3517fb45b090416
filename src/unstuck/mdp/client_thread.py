"""The thread that owns a client's socket: sockets of ZeroMQ are of one thread, and callers are of many."""

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from unstuck.errors import ClientClosed
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.mdp.client_session import ClientSession
from unstuck.mdp.connection import MAX_CLIENT_RECONNECT_MS, CurveKeys, DealerConnection, new_identity
from unstuck.mdp.pending_call import PendingCall

log = logger("unstuck.mdp.client")

CLOSE_S = 10.0
LINGER_MS = 200
AT_ONCE = 256
"""Messages that are read before the clocks are looked at again."""


class ClientThread:
    """Carries calls to the broker and its words back. `tell` gets each notice, in this line's thread."""

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        identity: bytes | None,
        conversation: ClientSession,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._conversation = conversation
        self._tell = tell
        self._pid = os.getpid()
        self._closing = False
        self._guard = threading.Lock()
        self._mailbox = Mailbox()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # Here and not in the thread, so that a wrong address is told to whoever gave it.
            self._connection = self._open(identity or new_identity())
        except BaseException:
            self._context.destroy(linger=0)
            self._mailbox.close()
            raise
        self._thread = threading.Thread(target=self._run, name="unstuck-mdp-client", daemon=True)
        self._thread.start()

    def submit(self, call: PendingCall) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed("This client was opened before a fork: open one in the new process.")
        with self._guard:
            if self._closing:
                raise ClientClosed("This client is closed.")
            self._mailbox.post(call)

    def close(self) -> None:
        """Give the socket back; what was not answered fails with `ClientClosed`."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            self._closing = True
            self._mailbox.post(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        error: Exception = ClientClosed("The client was closed before the reply came.")
        try:
            self._conversation.begin(time.monotonic())
            while not self._closing:
                self._round()
        except Exception as unforeseen:
            log.exception("The line to the broker ended by an error", endpoint=self._endpoint)
            error = unforeseen
        finally:
            self._end(error)

    def _round(self) -> None:
        conversation, connection = self._conversation, self._connection
        for frames in conversation.out:
            connection.send(frames)
        conversation.out.clear()
        if conversation.must_reopen:
            conversation.must_reopen = False
            self._connection.close()
            self._connection = self._open(new_identity())
            conversation.begin(time.monotonic())
            return
        due_s = conversation.due_s
        connection.wait(None if math.isinf(due_s) else due_s - time.monotonic())
        now_s = time.monotonic()
        for is_there in connection.changes():
            if is_there:
                conversation.come(now_s)
            else:
                conversation.lose()
        for call in self._mailbox.take():
            if call is not None:
                conversation.take(call, now_s)
        for _ in range(AT_ONCE):
            heard = connection.receive()
            if heard is None:
                break
            for notice in conversation.hear(heard, now_s):
                self._tell(notice)
        conversation.tick(now_s)

    def _open(self, identity: bytes) -> DealerConnection:
        connection = DealerConnection(self._context, self._endpoint, self._keys, identity, MAX_CLIENT_RECONNECT_MS)
        connection.watch(self._mailbox.fileno())
        return connection

    def _end(self, error: Exception) -> None:
        with self._guard:
            self._closing = True
        for call in self._mailbox.take():
            if call is not None:
                call.fail(error)
        self._conversation.end(error)
        self._connection.close(LINGER_MS)
        self._context.term()
        self._mailbox.close()
