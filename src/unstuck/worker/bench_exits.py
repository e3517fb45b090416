"""Say in plain words how a process ended."""

import os
import signal


def exit_cause(status: int | None, why: str) -> tuple[str, int | None, int | None]:
    """Give (words, exit code, signal) of a wait status; None where there was no process to wait for."""
    reason = f": {why}" if why else ""
    if status is None:
        return why or "it could not be started", None, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal_name(number)} (signal {number}){reason}", None, number
    code = os.waitstatus_to_exitcode(status)
    return f"exited with code {code}{reason}", code, None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal"
