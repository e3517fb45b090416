"""A few processes that stand for many workers in the ledger, to be killed all at once."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.builders import birth

from unstuck import host
from unstuck.ledger.contract import Ledger

VICTIMS = 500
PROCESSES = 20
Victim = subprocess.Popen[bytes]


@contextmanager
def registered_victims(ledger: Ledger) -> Iterator[list[Victim]]:
    """Give them, written down as workers; nobody beats for them, and nobody has to yet. They die with the block."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(PROCESSES)]
    try:
        started = [host.process_started(process.pid) for process in processes]
        for number in range(VICTIMS):
            process = processes[number % PROCESSES]
            facts = {"pid": process.pid, "process_started": started[number % PROCESSES], "suspect_after_s": 600.0}
            ledger.register(birth(f"victim-{number:03}", heartbeat_interval_s=5.0, **facts))
        yield processes
    finally:
        kill_all(processes)


def kill_all(victims: list[Victim]) -> None:
    for victim in victims:
        victim.kill()
    for victim in victims:
        victim.wait()
