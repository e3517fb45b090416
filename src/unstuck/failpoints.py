"""Name the worst moments, so that tests can kill, freeze, hang or break the program exactly there.

A failpoint costs one attribute look-up while nothing is armed. Arm them with
`UNSTUCK_FAILPOINTS="turn.after_claim=kill:2,enqueue.before_commit=stop"`: the action happens the
n-th time the point is passed (the first, without a number), in each process for itself.
"""

import os
import signal
import time

POINTS = frozenset(
    {
        "turn.before_commit",
        "turn.after_commit",
        "turn.answer_lost",
        "worker.after_claim",
        "worker.after_start",
        "worker.before_settle",
        "runner.before_user_code",
        "runner.after_user_code",
        "enqueue.before_commit",
        "enqueue.after_commit",
        "exchange.before_commit",
        "exchange.after_commit",
        "reap.after_declare_dead",
        "reap.before_settle",
        "reap.after_settle",
        "migrate.between",
        "migrate.before_commit",
        "beat.before",
        "sqlite.inside_write",
        "loop.step",
        "ledger_thread.turn",
        "heartbeat.step",
        "alerts.before_send",
        "alerts.after_send",
        "schedule.before_commit",
        "schedule.after_commit",
    }
)

ACTIONS = frozenset({"kill", "stop", "raise", "exit", "hang"})


HANG_S = 60.0


class FailpointHit(RuntimeError):
    """Raised by a point armed with `raise`."""


class _Armed:
    def __init__(self) -> None:
        self.points: dict[str, tuple[str, int]] = {}


_armed = _Armed()
active = False


def arm(text: str) -> None:
    """Arm points from their written form; an empty text disarms all."""
    global active
    _armed.points.clear()
    for part in filter(None, text.split(",")):
        name, _, rest = part.strip().partition("=")
        action, _, count = rest.partition(":")
        if name not in POINTS or action not in ACTIONS:
            raise ValueError(f"unknown failpoint {part!r}; points: {', '.join(sorted(POINTS))}")
        _armed.points[name] = (action, int(count or 1))
    active = bool(_armed.points)


def reached(name: str) -> None:
    """Do what is armed for this point. Callers write `if failpoints.active: failpoints.reached(…)`."""
    assert name in POINTS, name
    action, left = _armed.points.get(name, ("", 0))
    if not action:
        return
    if left > 1:
        _armed.points[name] = (action, left - 1)
        return
    del _armed.points[name]
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "hang":
            while True:
                time.sleep(HANG_S)
        case _:
            raise FailpointHit(name)


arm(os.environ.get("UNSTUCK_FAILPOINTS", ""))
