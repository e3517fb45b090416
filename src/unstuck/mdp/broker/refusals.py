"""What a worker hears that is not registered."""

from unstuck.mdp import protocol

COUNTED = {
    protocol.NAME_TAKEN: "a worker whose name another living worker has",
    protocol.TOO_MANY_SERVICES: "a worker of new services when the ledger knows too many",
}
"""How it is counted among what was dropped."""


def name_taken(name: str, worker_id: str = "") -> str:
    who = f" ({worker_id})" if worker_id else ""
    return f"A worker named {name!r} lives{who}. Choose another name, or stop that worker first."


def too_many_services(most: int) -> str:
    return (
        f"The ledger knows {most:,} tasks or more, and takes no new service over ZeroMQ. Serve known ones, and put "
        "what differs between them into the body."
    )
