"""Majordomo peers of the old kind, written from the specification with raw frames: they know nothing of ours.

    python -m tests.mdp.plain_peers client ENDPOINT SERVICE BODY
    python -m tests.mdp.plain_peers worker ENDPOINT SERVICE [--work SECONDS] [--gate FILE]

The client prints its reply, or `silence`. A message that it does not expect breaks it by an assertion, as it breaks
the clients of the guide.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq

TIMEOUT_S = 2.5
RETRIES = 3
HEARTBEAT_S = 2.5
LIVENESS = 3
LOOK_S = 0.005


class PlainClient:
    """One request at a time; sends it again from a new socket when patience ends, three times in all."""

    def __init__(
        self, endpoint: str, kind: int = zmq.REQ, timeout_s: float = TIMEOUT_S, retries: int = RETRIES
    ) -> None:
        self.endpoint = endpoint
        self.kind = kind
        self.timeout_s = timeout_s
        self.retries = retries
        self.context = zmq.Context()
        self.open()

    def open(self) -> None:
        self.socket = self.context.socket(self.kind)
        self.socket.linger = 0
        self.socket.connect(self.endpoint)

    def call(self, service: bytes, *body: bytes) -> list[bytes] | None:
        """Give the reply; None for silence."""
        # A REQ socket sends and takes away the empty frame by itself.
        before = [] if self.kind == zmq.REQ else [b""]
        for _ in range(self.retries):
            self.socket.send_multipart([*before, b"MDPC01", service, *body])
            if self.socket.poll(int(1000 * self.timeout_s)):
                frames = self.socket.recv_multipart()
                if before:
                    assert frames.pop(0) == b"", frames
                assert len(frames) >= 3, frames
                assert frames[0] == b"MDPC01", frames
                assert frames[1] == service, frames
                return frames[2:]
            self.socket.close(linger=0)
            self.open()
        return None

    def close(self) -> None:
        self.context.destroy(linger=0)


class PlainWorker:
    """One thread: silent while it works, beats when idle, reconnects on DISCONNECT and when the broker is silent."""

    def __init__(
        self,
        endpoint: str,
        service: bytes,
        work: Callable[[list[bytes]], list[bytes]],
        heartbeat_s: float = HEARTBEAT_S,
        reconnect_s: float = 2.5,
    ) -> None:
        self.endpoint = endpoint
        self.service = service
        self.work = work
        self.heartbeat_s = heartbeat_s
        self.reconnect_s = reconnect_s
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] | None = None
        self.open()

    def open(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 1000
        self.socket.connect(self.endpoint)
        self.say(b"\x01", self.service)
        self.liveness = LIVENESS
        self.beat_at = time.monotonic() + self.heartbeat_s

    def say(self, command: bytes, *rest: bytes) -> None:
        assert self.socket is not None
        self.socket.send_multipart([b"", b"MDPW01", command, *rest])

    def run(self) -> None:
        while True:
            self.round()

    def round(self) -> None:
        assert self.socket is not None
        if self.socket.poll(int(1000 * self.heartbeat_s)):
            empty, header, command, *rest = self.socket.recv_multipart()
            assert (empty, header) == (b"", b"MDPW01"), (empty, header)
            self.liveness = LIVENESS
            if command == b"\x02":
                address, empty, *body = rest
                assert empty == b"", rest
                self.say(b"\x03", address, b"", *self.work(body))
            elif command == b"\x05":
                self.open()
            else:
                assert command == b"\x04", command
        else:
            self.liveness -= 1
            if not self.liveness:
                time.sleep(self.reconnect_s)
                self.open()
        if time.monotonic() > self.beat_at:
            self.say(b"\x04")
            self.beat_at = time.monotonic() + self.heartbeat_s

    def close(self) -> None:
        self.context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("client", "worker"))
    parser.add_argument("endpoint")
    parser.add_argument("service")
    parser.add_argument("body", nargs="*")
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--gate", type=Path, help="work until this file exists")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_S)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--dealer", action="store_true")
    given = parser.parse_args()
    if given.kind == "client":
        client = PlainClient(given.endpoint, zmq.DEALER if given.dealer else zmq.REQ, given.timeout)
        reply = client.call(given.service.encode(), *(text.encode() for text in given.body or [""]))
        print("silence" if reply is None else b" ".join(reply).decode())
        client.close()
        return

    def work(body: list[bytes]) -> list[bytes]:
        print("working", os.getpid(), flush=True)
        time.sleep(given.work)
        while given.gate and not given.gate.exists():
            time.sleep(LOOK_S)
        return body

    try:
        PlainWorker(given.endpoint, given.service.encode(), work, given.heartbeat).run()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
