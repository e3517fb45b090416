"""Say random and mutated things to a broker for a while, and see that it lives, serves others, and stays small.

    python -m tests.mdp.fuzz --seconds 60 [--seed 7] [--url sqlite:///…]

Prints its seed: the same seed says the same things.
"""

import argparse
import random
import secrets
import tempfile
import time
from pathlib import Path

import cbor2
import zmq
from tests.mdp.broker import DISCONNECT, HEARTBEAT, READY, REQUEST, Broker, RawClient, RawWorker
from tests.support import run_guard
from tests.support.fleet import TIMEOUT_S
from tests.support.signals import OwnProcess

MB = 1024 * 1024
MAX_MEMORY_BYTES = 200 * MB
"""What the broker is told to stay under."""
MAX_OVER_BYTES = 150 * MB
"""It looks from time to time, and ends what it has begun."""
LOOK_EVERY_S = 0.5
ASK_AGAIN_S = 2.5
BEAT_S = 0.5
SOCKETS = 20
LINGER_MS = 3_000
"""Not 0: libzmq aborts the process that closes a socket in the midst of a message (session_base.cpp)."""
OPEN_JOBS = 5_000
"""Requests that nobody serves are jobs, and kept: after so many, no more are made."""
WORDS = [b"", b"MDPC01", b"MDPW01", b"MDPC02", b"MDPW02", *(bytes([number]) for number in range(12))]
NAMES = [b"fuzz-a", b"fuzz-b", b"mmi.service", b"mmi.notify", b"mmi.status", b"mmi.list", b"mmi.workers", b"mmi.x"]
KEYS = [
    "v",
    "ttl",
    "events",
    "priority",
    "JobID",
    "job_id",
    "idempotency_key",
    "error",
    "metadata",
    "name",
    "host",
    "instance",
    "holding",
]


class Fuzz:
    def __init__(self, endpoint: str, seed: int) -> None:
        self.endpoint = endpoint
        self.dice = random.Random(seed)
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.addresses = [b"1.1.abc.fuzz-a"]
        self.said = 0
        self.jobs = 0

    def step(self) -> None:
        dice = self.dice
        if len(self.sockets) < SOCKETS:
            self._open()
        if dice.random() < 0.01:
            self.sockets.pop(dice.randrange(len(self.sockets))).close(LINGER_MS)
            return
        socket = dice.choice(self.sockets)
        message = self._message()
        if b"MDPC01" in message[:3]:
            self.jobs += 1
            if self.jobs > OPEN_JOBS:
                return
        try:
            socket.send_multipart(message, zmq.DONTWAIT)
            self.said += 1
            if dice.random() < 0.5:
                heard = socket.recv_multipart(zmq.DONTWAIT)
                if heard[2:3] == [b"\x02"]:
                    self.addresses = [*self.addresses[-20:], heard[3]]
        except zmq.Again:
            pass

    def close(self) -> None:
        self.context.destroy(linger=LINGER_MS)

    def _open(self) -> None:
        dice = self.dice
        socket = self.context.socket(zmq.DEALER)
        socket.linger = LINGER_MS
        socket.sndhwm = 1000
        if dice.random() < 0.5:
            # A few identities for many sockets: they take each other's place.
            socket.identity = b"an identity of %02d bytes" % dice.randrange(8)
        socket.connect(self.endpoint)
        self.sockets.append(socket)

    def _message(self) -> list[bytes]:
        dice = self.dice
        kind = dice.random()
        if kind < 0.35:
            message = [b"", b"MDPC01", dice.choice(NAMES), *self._frames(1, 3)]
        elif kind < 0.7:
            command = bytes([dice.randrange(1, 8)])
            rest = {
                b"\x01": [dice.choice(NAMES), *([b"", self._map()] if dice.random() < 0.3 else [])],
                b"\x03": [dice.choice(self.addresses), b"", *self._frames(1, 3)],
                b"\x07": [dice.choice(self.addresses), self._map()],
            }.get(command, [])
            message = [b"", b"MDPW01", command, *rest]
        else:
            message = self._frames(1, 12)
        if dice.random() < 0.3:
            message = self._mutated(message)
        return message or [b""]

    def _mutated(self, message: list[bytes]) -> list[bytes]:
        dice = self.dice
        message = list(message)
        at = dice.randrange(len(message))
        match dice.randrange(5):
            case 0:
                del message[at]
            case 1:
                message.insert(at, self._frame())
            case 2:
                message[at] = self._frame()
            case 3 if message[at]:
                changed = bytearray(message[at])
                changed[dice.randrange(len(changed))] = dice.randrange(256)
                message[at] = bytes(changed)
            case _:
                dice.shuffle(message)
        return message

    def _frames(self, least: int, most: int) -> list[bytes]:
        return [self._frame() for _ in range(self.dice.randint(least, most))]

    def _frame(self) -> bytes:
        dice = self.dice
        kind = dice.random()
        if kind < 0.4:
            return dice.choice([*WORDS, *NAMES])
        if kind < 0.7:
            return self._map()
        if kind < 0.995:
            return dice.randbytes(dice.randrange(40))
        return dice.randbytes(1000) * dice.choice([1, 100, 1000, 10_000])

    def _map(self) -> bytes:
        dice = self.dice
        values = [1, 0, -1, 2**70, 10**5000, 1.5, float("nan"), float("inf"), "x", "\0", b"\xff", None, [], {"a": [1]}]
        return cbor2.dumps({dice.choice(KEYS): dice.choice(values) for _ in range(dice.randrange(4))} | {"v": 1})


def ask_and_serve(client: RawClient, worker: RawWorker, service: bytes, said: bytes) -> None:
    """Be served as old peers are that know nothing of a socket that begins afresh: the worker beats and says READY
    when it is sent away, the client asks again when no answer comes."""
    until_s = time.monotonic() + TIMEOUT_S
    ask_at_s = beat_at_s = 0.0
    while True:
        now_s = time.monotonic()
        assert now_s < until_s, f"nobody answered {said!r}"
        if now_s >= ask_at_s:
            client.ask(service, said)
            ask_at_s = now_s + ASK_AGAIN_S
        if now_s >= beat_at_s:
            worker.tell(HEARTBEAT)
            beat_at_s = now_s + BEAT_S
        # What comes for the client wakes nobody here: it comes after the worker's own word.
        if worker.socket.poll(5):
            command, *rest = worker.hear()[2:]
            if command == DISCONNECT:
                worker.tell(READY, service)
            elif command == REQUEST:
                worker.reply(rest[0], *rest[2:])
        # An earlier question that was asked twice is answered twice.
        while client.socket.poll(0):
            if client.answer(service) == [said]:
                return


def serve_newcomers(broker: Broker) -> None:
    """Check that a worker and a client that the broker does not know are served. It may still reopen its socket."""
    assert broker.process.poll() is None, broker.log.read_text()[-4000:]
    service = b"new-" + secrets.token_hex(4).encode()
    worker, client = RawWorker(broker.endpoint, service), RawClient(broker.endpoint)
    try:
        ask_and_serve(client, worker, service, b"are you well?")
    finally:
        worker.tell(DISCONNECT)
        worker.close()
        client.close()


def run(broker: Broker, seconds: float, seed: int) -> dict[str, float]:
    """Fuzz a broker for so long; gives what was said and seen. Raises AssertionError when it failed somebody."""
    fuzz = Fuzz(broker.endpoint, seed)
    process = OwnProcess(broker.process.pid)
    service = b"served-" + secrets.token_hex(4).encode()
    worker, client = RawWorker(broker.endpoint, service), RawClient(broker.endpoint)
    before = most = process.memory_info().rss
    served, slowest_s = 0, 0.0
    until_s = time.monotonic() + seconds
    try:
        while time.monotonic() < until_s:
            look_s = time.monotonic() + LOOK_EVERY_S
            while time.monotonic() < look_s:
                fuzz.step()
            asked_s = time.monotonic()
            assert broker.process.poll() is None, broker.log.read_text()[-4000:]
            ask_and_serve(client, worker, service, b"%d" % served)
            served += 1
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            most = max(most, process.memory_info().rss)
            assert most < MAX_MEMORY_BYTES + MAX_OVER_BYTES, f"grew to {most / MB:.0f} MB"
    finally:
        fuzz.close()
        worker.close(0)
        client.close(0)
    serve_newcomers(broker)
    return {"said": fuzz.said, "served": served, "slowest_s": slowest_s, "grew_mb": (most - before) / MB}


def main() -> None:
    run_guard.start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--url")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        url = given.url or f"sqlite:///{folder}/ledger.db"
        broker = Broker(url, Path(folder) / "broker.log", max_memory_bytes=MAX_MEMORY_BYTES)
        try:
            seen = run(broker, given.seconds, given.seed)
            assert broker.stop() == 0, broker.log.read_text()[-4000:]
        finally:
            broker.process.kill()
            broker.process.wait(10)
    print(", ".join(f"{name} {value:.4g}" for name, value in seen.items()))


if __name__ == "__main__":
    main()
