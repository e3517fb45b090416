"""A minimal Majordomo broker (7/MDP 0.1, 8/MMI), all in memory, written from the specification with raw frames.

It stands for every foreign broker, and is what the benchmark compares with. It is as strict as the reference
implementations: a message that is not in the specification ends it with exit code 1.

    python -m tests.mdp.reference_broker --bind tcp://127.0.0.1:*
"""

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import zmq

LIVENESS = 3


@dataclass
class Service:
    requests: "deque[tuple[bytes, list[bytes]]]" = field(default_factory=deque)
    waiting: "deque[Worker]" = field(default_factory=deque)
    workers: int = 0


@dataclass(eq=False)
class Worker:
    identity: bytes
    service: Service
    expires_at: float


class Broker:
    def __init__(self, bind: str, heartbeat_s: float = 2.5) -> None:
        self.heartbeat_s = heartbeat_s
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(bind)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.services: dict[bytes, Service] = {}
        self.workers: dict[bytes, Worker] = {}

    def run(self) -> None:
        beat_at = time.monotonic() + self.heartbeat_s
        while True:
            if self.socket.poll(max(0, int(1000 * (beat_at - time.monotonic())))):
                identity, empty, header, *rest = self.socket.recv_multipart()
                assert empty == b"", "no empty frame where one belongs"
                if header == b"MDPC01":
                    self.from_client(identity, rest)
                else:
                    assert header == b"MDPW01", f"a header {header!r}"
                    self.from_worker(identity, rest)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self.heartbeat_s
                self.purge()
                # As the reference does: those who work hear nothing meanwhile.
                for service in self.services.values():
                    for worker in service.waiting:
                        self.socket.send_multipart([worker.identity, b"", b"MDPW01", b"\x04"])

    def from_client(self, identity: bytes, rest: list[bytes]) -> None:
        assert len(rest) >= 2, "a request without a body"
        name, *body = rest
        if name.startswith(b"mmi."):
            code = b"501"
            if name == b"mmi.service":
                known = self.services.get(body[-1])
                code = b"200" if known is not None and known.workers else b"404"
            self.socket.send_multipart([identity, b"", b"MDPC01", name, code])
            return
        service = self.services.setdefault(name, Service())
        service.requests.append((identity, body))
        self.dispatch(service)

    def from_worker(self, identity: bytes, rest: list[bytes]) -> None:
        command, *rest = rest
        worker = self.workers.get(identity)
        if command == b"\x01":
            assert len(rest) == 1, f"READY with {len(rest)} frames"
            if worker is not None or rest[0].startswith(b"mmi."):
                self.remove(identity, tell=True)
                return
            service = self.services.setdefault(rest[0], Service())
            service.workers += 1
            worker = self.workers[identity] = Worker(identity, service, 0)
            self.wait(worker)
        elif command == b"\x03":
            address, empty, *body = rest
            assert empty == b"", "REPLY without an empty frame after the address"
            assert body, "REPLY without a body"
            if worker is None:
                self.remove(identity, tell=True)
                return
            name = next(name for name, service in self.services.items() if service is worker.service)
            self.socket.send_multipart([address, b"", b"MDPC01", name, *body])
            self.wait(worker)
        elif command == b"\x04":
            if worker is None:
                self.remove(identity, tell=True)
            else:
                worker.expires_at = time.monotonic() + LIVENESS * self.heartbeat_s
        else:
            assert command == b"\x05", f"a worker's command {command!r}"
            self.remove(identity, tell=False)

    def wait(self, worker: Worker) -> None:
        worker.expires_at = time.monotonic() + LIVENESS * self.heartbeat_s
        worker.service.waiting.append(worker)
        self.dispatch(worker.service)

    def dispatch(self, service: Service) -> None:
        self.purge(service)
        while service.requests and service.waiting:
            client, body = service.requests.popleft()
            worker = service.waiting.popleft()
            self.socket.send_multipart([worker.identity, b"", b"MDPW01", b"\x02", client, b"", *body])

    def purge(self, only: Service | None = None) -> None:
        now = time.monotonic()
        for service in [only] if only is not None else self.services.values():
            # Who waits longest expires first.
            while service.waiting and service.waiting[0].expires_at < now:
                self.remove(service.waiting[0].identity, tell=False)

    def remove(self, identity: bytes, tell: bool) -> None:
        if tell:
            self.socket.send_multipart([identity, b"", b"MDPW01", b"\x05"])
        worker = self.workers.pop(identity, None)
        if worker is not None:
            worker.service.workers -= 1
            if worker in worker.service.waiting:
                worker.service.waiting.remove(worker)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", default="tcp://127.0.0.1:*")
    parser.add_argument("--heartbeat", type=float, default=2.5)
    given = parser.parse_args()
    broker = Broker(given.bind, given.heartbeat)
    print(broker.endpoint, flush=True)
    try:
        broker.run()
    except KeyboardInterrupt:
        sys.exit(0)
    finally:
        broker.context.destroy(linger=0)


if __name__ == "__main__":
    main()
