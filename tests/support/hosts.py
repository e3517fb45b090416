"""Other hosts on this machine: a process can be given a host name, a network and a boot id of its own.

A ledger tells hosts apart by these. Two workers with different host names are no neighbours: neither may ask the
kernel about the other.
"""

import ctypes
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pytest

_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_PRIVATE_TREE, _BIND = (1 << 18) | (1 << 14), 1 << 12
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Host(NamedTuple):
    """What is different there; empty words are as they are here."""

    host: str = ""
    network: str = ""
    """The name of a network namespace, as `ip netns` has it."""
    boot_id: str = ""
    cgroup: str = ""
    """A folder of the cgroup file system."""

    def enter(self) -> None:
        """Move this process there. It must have one thread, and there is no way back."""
        if self.cgroup:
            Path(self.cgroup, "cgroup.procs").write_text("0")
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


HERE = Host()


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@cache
def can_enter(place: Host) -> bool:
    """Return whether this system and this account allow it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        tried = subprocess.run(["true"], preexec_fn=place.enter, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode == 0


_NOBODY = "02:00:00:00:00:99"
_numbers = itertools.count()


class Network:
    """One namespace with one cable to this machine; `here` is our address on it."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.name = f"unstuck-{os.getpid()}-{number}"
        # Names of network cards have at most 15 characters.
        self._near, self._far = f"ua{os.getpid()}n{number}", f"ub{os.getpid()}n{number}"
        third, fourth = random.SystemRandom().randrange(256), 4 * random.SystemRandom().randrange(64)
        self.here, self.there = f"10.213.{third}.{fourth + 1}", f"10.213.{third}.{fourth + 2}"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
            _ip("address", "add", f"{self.here}/30", "dev", self._near)
            _ip("-n", self.name, "address", "add", f"{self.there}/30", "dev", self._far)
            _ip("link", "set", self._near, "up")
            _ip("-n", self.name, "link", "set", self._far, "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
            self._near_card = _card(self._near)
            self._far_card = _card(self._far, "-n", self.name)
            self.heal()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Lose every packet from there (requests), from here (answers), or both."""
        if requests:
            self._lead_there(_NOBODY)
        if answers:
            self._lead_here(_NOBODY)

    def heal(self) -> None:
        self._lead_there(self._near_card)
        self._lead_here(self._far_card)

    def close(self) -> None:
        _ip("netns", "delete", self.name)

    def _lead_there(self, card: str) -> None:
        words = ("neighbour", "replace", self.here, "lladdr", card, "dev", self._far, "nud", "permanent")
        _ip("-n", self.name, *words)

    def _lead_here(self, card: str) -> None:
        _ip("neighbour", "replace", self.there, "lladdr", card, "dev", self._near, "nud", "permanent")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _card(name: str, *where: str) -> str:
    words = _ip(*where, "-brief", "link", "show", name).split()
    return words[2]


@cache
def can_make_networks() -> bool:
    """Return whether this system and this account allow it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        Network().close()
    except OSError:
        return False
    return True


needs_networks = pytest.mark.skipif(
    not can_make_networks(), reason="may not make network namespaces (root, Linux, iproute2)"
)
