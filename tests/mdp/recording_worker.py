"""A worker that writes down what it does, ours or an old one: lines in a file say what really happened.

    python -m tests.mdp.recording_worker ENDPOINT SERVICE NOTES [--plain] [--name NAME]

The first frame of a request is `NAME [SECONDS [GATE]]`: it writes `begin NAME`, takes so many seconds, waits for the
file GATE, and writes `end NAME`. Or it is JSON, and comes back as such.
"""

import argparse
import os
import time
from pathlib import Path

from tests.mdp.plain_peers import PlainWorker

from unstuck.logs import setup
from unstuck.mdp import Worker

LOOK_S = 0.005


class Notes:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, word: str, name: str) -> None:
        # The clock is that of the machine: the same for all processes.
        os.write(self._file, f"{word} {name} {os.getpid()} {time.monotonic_ns()}\n".encode())

    def work(self, body: list[bytes]) -> list[bytes]:
        if body[0].startswith(b"{"):
            self.write("begin", "json")
            self.write("end", "json")
            return [b'{"seen": ' + body[0] + b"}"]
        name, seconds, gate = [*body[0].decode().split(), "", ""][:3]
        self.write("begin", name)
        time.sleep(float(seconds or 0))
        while gate and not Path(gate).exists():
            time.sleep(LOOK_S)
        self.write("end", name)
        return [b"done " + name.encode()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("service")
    parser.add_argument("notes")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--name")
    given = parser.parse_args()
    setup()
    notes = Notes(given.notes)
    if given.plain:
        PlainWorker(given.endpoint, given.service.encode(), notes.work).run()
    Worker(given.endpoint, given.service, notes.work, name=given.name).run()


if __name__ == "__main__":
    main()
