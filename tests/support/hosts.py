"""Other hosts on this machine: a process can be given a host name, a network and a boot id of its own.

A ledger tells hosts apart by these. Two workers with different host names are no neighbours: neither may ask the
kernel about the other.
"""

import ctypes
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
    """The path of a network namespace."""
    boot_id: str = ""
    cgroup: str = ""
    """A folder of the cgroup file system."""

    def enter(self) -> None:
        """Move this process there. It must have one thread, and there is no way back."""
        if self.cgroup:
            Path(self.cgroup, "cgroup.procs").write_text("0")
        if self.network:
            with open(self.network, "rb") as file:
                _call("setns", file.fileno(), _NEW_NETWORK)
        if self.host:
            _call("unshare", _NEW_HOSTNAME)
            socket.sethostname(self.host)
        if self.boot_id:
            leave_mounts()
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write(f"{self.boot_id}\n")
            _call("mount", file.name.encode(), os.fsencode(_BOOT_ID), None, _BIND, None)
            os.unlink(file.name)


HERE = Host()


def leave_mounts() -> None:
    """Give this process and what it starts mounts of their own. It must have one thread."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _PRIVATE_TREE, None)


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


class Hub:
    """A network of its own for this thread and what it starts from then on, with nothing but a loopback device.

    It and all that is connected to it vanish with the last process in it."""

    def __init__(self) -> None:
        self._outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._inside = _new_network()
        self.path = _path(self._inside)
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        _call("setns", self._inside, _NEW_NETWORK)
        _ip("link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        _call("setns", self._outside, _NEW_NETWORK)
        os.close(self._outside)
        os.close(self._inside)

    def connect(self) -> "Network":
        return Network(next(self._numbers))


def _new_network() -> int:
    """Return a descriptor of a new namespace, made by a thread that ends."""

    def make() -> int:
        _call("unshare", _NEW_NETWORK)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


class Network:
    """One namespace with one cable to the hub that this thread is in; `here` is our address on it."""

    def __init__(self, number: int) -> None:
        self._namespace = _new_network()
        self.path = _path(self._namespace)
        self._near, self._far = f"near{number}", f"far{number}"
        self.here, self.there = f"10.213.{number}.1", f"10.213.{number}.2"
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.path)
            _ip("address", "add", f"{self.here}/30", "dev", self._near)
            _ip("address", "add", f"{self.there}/30", "dev", self._far, inside=self.path)
            _ip("link", "set", self._near, "up")
            _ip("link", "set", self._far, "up", inside=self.path)
            _ip("link", "set", "lo", "up", inside=self.path)
            self._near_card = _card(self._near)
            self._far_card = _card(self._far, inside=self.path)
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
        os.close(self._namespace)

    def _lead_there(self, card: str) -> None:
        words = ("neighbour", "replace", self.here, "lladdr", card, "dev", self._far, "nud", "permanent")
        _ip(*words, inside=self.path)

    def _lead_here(self, card: str) -> None:
        _ip("neighbour", "replace", self.there, "lladdr", card, "dev", self._near, "nud", "permanent")


def _ip(*words: str, inside: str = "") -> str:
    enter = Host(network=inside).enter
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, preexec_fn=enter)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _card(name: str, inside: str = "") -> str:
    words = _ip("-brief", "link", "show", name, inside=inside).split()
    return words[2]


@cache
def can_make_networks() -> bool:
    """Return whether this system and this account allow it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        with Hub() as hub:
            hub.connect().close()
    except OSError:
        return False
    return True


# Asked by fixtures (`tests/conftest.py`): nothing is made while tests are only collected.
needs_other_hosts = pytest.mark.usefixtures("other_hosts")
needs_other_boots = pytest.mark.usefixtures("other_boots")
needs_own_mounts = pytest.mark.usefixtures("own_mounts")
needs_networks = pytest.mark.usefixtures("networks")
