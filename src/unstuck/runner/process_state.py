"""Put the state of the process that a job changed back, so that it does not leak into the next job."""

import os
import signal
import time
from typing import Any

# The C functions: those of the module make enums of every answer, and these are asked once per job.
_getsignal = __import__("_signal").getsignal
_NUMBERS = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
MAX_NAMES = 10


class ProcessState:
    """The state that this process has now: working directory, environment, umask, signal handlers, blocked signals.

    Everything else that belongs to a whole process (limits, locale, modules, threads) stays as a job left it."""

    def __init__(self) -> None:
        self._directory_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directory = _identity()
        self._environ = os.environ
        self._variables = dict(_data(os.environ))
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._handlers = [_getsignal(number) for number in _NUMBERS]
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._told: set[str] = set()

    def restore(self) -> tuple[str, bool]:
        """Put everything back. Return what to tell about it, once for each kind, and whether all of it succeeded.

        Never raises: the outcome of the job is still to be reported, whatever it left behind."""
        try:
            return self._restore()
        except Exception:  # noqa: BLE001 - a handler of user code may raise even when it is compared
            return "", False

    def _restore(self) -> tuple[str, bool]:
        changed: dict[str, str] = {}
        succeeded = True
        if _identity() != self._directory:
            changed["directory"] = "the working directory"
            succeeded = self._go_back()
        if os.environ is not self._environ or _data(os.environ) != self._variables:
            changed["variables"] = self._restore_variables()
        if os.umask(self._umask) != self._umask:
            changed["umask"] = "the umask"
        if [_getsignal(number) for number in _NUMBERS] != self._handlers:
            changed["handlers"] = "signal handlers"
            succeeded = self._restore_handlers() and succeeded
        if signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked) != self._blocked:
            changed["blocked"] = "blocked signals"
        if not changed:
            return "", True
        news = [words for kind, words in changed.items() if kind not in self._told]
        self._told |= changed.keys()
        return " and ".join(news), succeeded

    def _go_back(self) -> bool:
        try:
            os.fchdir(self._directory_fd)
        except OSError:
            return False
        return True

    def _restore_variables(self) -> str:
        os.environ = self._environ  # noqa: B003 - this is the object that was there before
        now, before = dict(_data(os.environ)), self._variables
        names = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        for name in names:
            if name in before:
                os.environb[name] = before[name]
            else:
                del os.environb[name]
        if b"TZ" in names:
            time.tzset()
        # Names alone: values may be secrets.
        shown = ", ".join(os.fsdecode(name) for name in names[:MAX_NAMES])
        return f"environment variables ({shown}{', …' if len(names) > MAX_NAMES else ''})"

    def _restore_handlers(self) -> bool:
        succeeded = True
        for number, before in zip(_NUMBERS, self._handlers, strict=True):
            if _getsignal(number) is before:
                continue
            if before is None:  # it was installed by C code, and only that could do it again
                succeeded = False
            else:
                signal.signal(number, before)
        return succeeded


def _identity() -> tuple[int, int] | None:
    try:
        found = os.stat(".")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _data(environ: Any) -> dict[bytes, bytes]:
    # The dict behind os.environ: to decode every variable after every job would cost more than most jobs.
    found: dict[bytes, bytes] = environ._data
    return found
