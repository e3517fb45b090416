"""Look at a process that imported the user's app and decide whether it may be forked."""

import os
import sys
import threading
from pathlib import Path

_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")
_MAX_NAMED = 3


def descriptors() -> dict[int, str]:
    """Give the open descriptors of this process and what they are."""
    found = {}
    try:
        for entry in os.listdir("/proc/self/fd"):
            try:
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
            except OSError:
                continue
    except OSError:
        pass
    return found


def why_not_fork(before: dict[int, str]) -> str:
    """Say what the import left behind that would not survive a fork; empty when nothing did."""
    if not sys.platform.startswith("linux"):
        return f"forking is not safe on {sys.platform}"
    reasons = [*_threads()]
    for fd, target in descriptors().items():
        if before.get(fd) == target:
            continue
        if target.startswith("socket:"):
            reasons.append(f"an open socket (descriptor {fd})")
        elif target.startswith(_GPU_DEVICES):
            reasons.append(f"a GPU context ({target})")
    if not reasons:
        return ""
    more = f" and {len(reasons) - _MAX_NAMED} more" if len(reasons) > _MAX_NAMED else ""
    return f"importing the app left {', '.join(reasons[:_MAX_NAMED])}{more}, which cannot be forked"


def _threads() -> list[str]:
    named = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    reasons = [f"the thread {thread.name!r}" for thread in named]
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        return reasons
    known = {thread.native_id for thread in named} | {threading.main_thread().native_id}
    native = [entry for entry in os.listdir("/proc/self/task") if int(entry) not in known] if count > 1 else []
    for entry in native:
        try:
            name = Path(f"/proc/self/task/{entry}/comm").read_text().strip()
        except OSError:
            continue
        reasons.append(f"a thread of native code ({name})")
    return reasons
