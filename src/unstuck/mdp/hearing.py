"""Read what a broker says, as a client or as a worker; whatever arrives, reading never raises."""

from dataclasses import dataclass

from unstuck.mdp import frames
from unstuck.mdp.frames import Beat, Bye, Frames


@dataclass(frozen=True)
class Answer:
    """The reply to a request."""

    service: bytes
    body: tuple[bytes, ...]
    correlation: bytes | None = None


@dataclass(frozen=True)
class Notice:
    """News of a job of ours: one CBOR map, or several of one moment."""

    command: bytes
    maps: tuple[bytes, ...]
    correlation: bytes | None = None


@dataclass(frozen=True)
class Order:
    """Work for a worker; its reply carries the same address."""

    address: bytes
    body: tuple[bytes, ...]


def hear_as_client(heard: Frames) -> Answer | Notice | None:
    """None is what makes no sense: it is dropped."""
    correlation = None
    if len(heard) > 1 and heard[0] != frames.EMPTY and heard[1] == frames.EMPTY:
        correlation, heard = heard[0], heard[1:]
    if len(heard) < 3 or heard[0] != frames.EMPTY or heard[1] != frames.CLIENT:
        return None
    if heard[2] in frames.NOTICES:
        return Notice(heard[2], tuple(heard[3:]), correlation)
    return Answer(heard[2], tuple(heard[3:]), correlation)


def hear_as_worker(heard: Frames) -> Order | Beat | Bye | None:
    """None is what makes no sense: it is dropped."""
    if len(heard) < 3 or heard[0] != frames.EMPTY or heard[1] != frames.WORKER:
        return None
    match heard[2]:
        case frames.REQUEST if len(heard) >= 5 and heard[4] == frames.EMPTY:
            return Order(heard[3], tuple(heard[5:]))
        case frames.HEARTBEAT:
            return Beat()
        case frames.DISCONNECT:
            return Bye(heard[3] if len(heard) > 3 else frames.EMPTY)
    return None
