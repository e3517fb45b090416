"""Other hosts on this machine: a process can be given a host name, a network and a boot id of its own.

A ledger tells hosts apart by these. Two workers with different host names are no neighbours: neither may ask the
kernel about the other.
"""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_PRIVATE_TREE, _BIND = (1 << 18) | (1 << 14), 1 << 12
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """What is different there; empty words are as they are here."""

    host: str = ""
    network: str = ""
    """The name of a network namespace, as `ip netns` has it."""
    boot_id: str = ""

    def enter(self) -> None:
        """Move this process there. It must have one thread, and there is no way back."""
        if self.network:
            with open(f"/run/netns/{self.network}", "rb") as file:
                _call("setns", file.fileno(), _NEW_NETWORK)
        if self.host:
            _call("unshare", _NEW_HOSTNAME)
            socket.sethostname(self.host)
        if self.boot_id:
            _call("unshare", _NEW_MOUNTS)
            _call("mount", b"none", b"/", None, _PRIVATE_TREE, None)
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write(f"{self.boot_id}\n")
            _call("mount", file.name.encode(), os.fsencode(_BOOT_ID), None, _BIND, None)
            os.unlink(file.name)


HERE = Place()


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@cache
def can_enter(place: Place) -> bool:
    """Return whether this system and this account allow it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        tried = subprocess.run(["true"], preexec_fn=place.enter, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode == 0
