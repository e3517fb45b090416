"""The app of the crash tests of lines and limits: its tasks measure themselves how many are at work."""

import fcntl
import os
import time
from pathlib import Path

from unstuck import App

app = App()
app.queue("narrow", concurrency=2)


def _alone(folder: str, names: list[str], seconds: float) -> bool:
    """Hold one of these locks while at work. The kernel gives it back with the life of the process: who finds them all
    taken has more neighbours than may be, living ones."""
    for name in names:
        fd = os.open(Path(folder) / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            time.sleep(seconds)
            return True
        finally:
            os.close(fd)
    (Path(folder) / f"together-{names[0]}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return False


@app.task(concurrency_key="customer:{customer}", on_crash="retry", max_crash_retries=1000, overlap="never")
def serve(customer: str, folder: str, seconds: float) -> bool:
    return _alone(folder, [f"lock-{customer}"], seconds)


@app.task(queue="narrow", on_crash="retry", max_crash_retries=1000, overlap="never")
def squeeze(folder: str, seconds: float) -> bool:
    return _alone(folder, ["seat-1", "seat-2"], seconds)
