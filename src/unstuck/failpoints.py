"""Name the worst moments, so that tests can kill, freeze, hang or break the program exactly there.

A failpoint costs one attribute look-up while nothing is armed. Arm them with
`UNSTUCK_FAILPOINTS="turn.after_claim=kill:2,enqueue.before_commit=stop"`: the action happens the
n-th time the point is passed (the first, without a number), in each process for itself.

`turn.before_commit=note:/path/to/a/file` only reports: each time the point is passed, a line with the process id and
the name is added to the file. A test waits for that line instead of sleeping. A point may have a note and an action.

`loop.step=hang_if:/path/to/a/file` hangs at the point once the file is there, and goes on when it is gone.
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
        "ledger_thread.compare",
        "heartbeat.step",
        "alerts.before_send",
        "alerts.after_send",
        "schedule.before_commit",
        "schedule.after_commit",
        "http.request_received",
        "http.claim_waiting",
        "http.answer_waiting",
        "http.result_waiting",
    }
)

ACTIONS = frozenset({"kill", "stop", "raise", "exit", "hang", "hang_if", "note"})
WITH_A_FILE = frozenset({"hang_if", "note"})

HANG_S = 60.0
LOOK_EVERY_S = 0.05


class FailpointHit(RuntimeError):
    """Raised by a point armed with `raise`."""


class _Armed:
    def __init__(self) -> None:
        self.points: dict[str, tuple[str, int]] = {}
        self.notes: dict[str, str] = {}
        """The file that each passing of the point is noted in."""
        self.hangs: dict[str, str] = {}
        """The file that makes the point hang as long as it is there."""


_armed = _Armed()
active = False


def arm(text: str) -> None:
    """Arm points from their written form; an empty text disarms all."""
    global active
    _armed.points.clear()
    _armed.notes.clear()
    _armed.hangs.clear()
    for part in filter(None, text.split(",")):
        name, _, rest = part.strip().partition("=")
        action, _, argument = rest.partition(":")
        if name not in POINTS or action not in ACTIONS or (action in WITH_A_FILE and not argument):
            raise ValueError(f"unknown failpoint {part!r}; points: {', '.join(sorted(POINTS))}")
        if action == "note":
            _armed.notes[name] = argument
        elif action == "hang_if":
            _armed.hangs[name] = argument
        else:
            _armed.points[name] = (action, int(argument or 1))
    active = bool(_armed.points or _armed.notes or _armed.hangs)


def reached(name: str) -> None:
    """Do what is armed for this point. Callers write `if failpoints.active: failpoints.reached(…)`."""
    assert name in POINTS, name
    if name in _armed.notes:
        _note(name, _armed.notes[name])
    while name in _armed.hangs and os.path.exists(_armed.hangs[name]):
        time.sleep(LOOK_EVERY_S)
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


def _note(name: str, path: str) -> None:
    # One write to a file opened for appending: lines of several processes and threads never mix.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, f"{os.getpid()} {name}\n".encode())
    finally:
        os.close(fd)


arm(os.environ.get("UNSTUCK_FAILPOINTS", ""))
