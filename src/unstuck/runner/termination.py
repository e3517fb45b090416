"""Let a SIGTERM to everybody pass by a runner, without hiding it from user code or from what that starts.

systemd tells every process of a service to end. Only the worker may decide what that means for a job: it may
be draining. So runners overhear the signal; a handler of user code still gets it.
"""

import os
import signal

_blocked_by_us = False


def overhear() -> None:
    """Begin to overhear SIGTERM in this process, and see that forks of it do not."""
    # A handler, not SIG_IGN: what user code executes would inherit that.
    signal.signal(signal.SIGTERM, _pass_by)
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_obey_again)


def _pass_by(*_: object) -> None:
    pass


def _hold() -> None:
    # Held back while forking: a child told to end at once must not overhear it in its first instructions.
    global _blocked_by_us
    if signal.getsignal(signal.SIGTERM) is _pass_by:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _blocked_by_us = signal.SIGTERM not in before


def _release() -> None:
    global _blocked_by_us
    if _blocked_by_us:
        _blocked_by_us = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _obey_again() -> None:
    if signal.getsignal(signal.SIGTERM) is _pass_by:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
