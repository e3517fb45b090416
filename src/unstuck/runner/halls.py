"""Decide where in the cgroup trees the rooms of our runners may stand, and build the hall that holds them.

Controllers can be switched on only in a cgroup that holds no processes itself. Under systemd's `Delegate=yes` with
`DelegateSubgroup=` we live in a leaf, and the hall becomes its sibling. Without a subgroup we step aside into a leaf of
our own, but only if nobody else lives there: to move a stranger is not our business. What is not delegated to us,
or is the root of the whole tree, is not changed.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from unstuck import host
from unstuck.domain.liveness import Process
from unstuck.runner import cgroups

PREFIX = "unstuck-"
LEAF = "aside.unstuck"
"""The cgroup into which worker and nursery step aside. Nobody else would call one so: by this name we know our own."""
WANTED = ("memory", "pids")
_DELEGATE_MARKS = ("user.delegate", "trusted.delegate")


class Site(msgspec.Struct, frozen=True):
    """Where the hall is to stand."""

    base: Path
    enable: bool = False
    """Controllers may be switched on for what stands below."""
    aside: tuple[int, ...] = ()
    """Processes that must first move into the leaf."""
    why_not: str = ""
    """Why rooms get no controllers."""


class Hall(msgspec.Struct, frozen=True):
    path: Path
    controllers: tuple[str, ...] = ()
    """What can be bounded for each room below."""
    why_not: str = ""


def is_delegated(group: Path) -> bool:
    """Say whether systemd marked this cgroup as given away."""
    for mark in _DELEGATE_MARKS:
        try:
            if os.getxattr(group, mark) == b"1":
                return True
        except (OSError, AttributeError):
            continue
    return False


def choose(own: Path, mount: Path, ours: Collection[int], delegated: Callable[[Path], bool] = is_delegated) -> Site:
    """Choose the place for a hall, from where we live and who lives there too. Changes nothing."""
    parent = own.parent
    if own != mount and (own.name == LEAF or delegated(parent)):
        if not cgroups.members(parent):
            return Site(parent, enable=True)
        return Site(own, why_not=f"processes live in {parent} itself")
    if not (own / "cgroup.type").exists():
        return Site(own, why_not="we live in the root of all cgroups, which is not ours to divide")
    if not delegated(own) and own != mount:
        return Site(own, why_not="the cgroup is not delegated: set Delegate=yes and DelegateSubgroup= in the unit")
    # Delegated, or the root of our own namespace (a container): nobody but us has a say in it.
    living = cgroups.members(own)
    strangers = [pid for pid in living if pid not in ours]
    if strangers:
        return Site(own, why_not=f"other processes live in {own} too: set DelegateSubgroup= in the unit")
    return Site(own, enable=True, aside=tuple(living))


def build(site: Site, name: str) -> Hall | None:
    """Make the hall, with every controller that we need and can have; None where it cannot be made."""
    if site.aside:
        leaf = site.base / LEAF
        if (not cgroups.make(leaf) and not leaf.is_dir()) or not all(cgroups.enter(leaf, pid) for pid in site.aside):
            site = Site(site.base, why_not=f"our processes could not step aside into {leaf}")
    if site.enable:
        for controller in sorted(cgroups.words(site.base / "cgroup.controllers") & set(WANTED)):
            cgroups.write(site.base / "cgroup.subtree_control", f"+{controller}")
    path = site.base / name
    if not cgroups.make(path):
        return None
    there = cgroups.words(path / "cgroup.controllers")
    # One by one: one that is refused must not cost us the other.
    taken = [c for c in WANTED if c in there and cgroups.write(path / "cgroup.subtree_control", f"+{c}")]
    missing = [c for c in WANTED if c not in taken]
    why_not = site.why_not or f"{site.base} has no controller {' or '.join(missing)}"
    return Hall(path, tuple(taken), why_not if missing else "")


def name_of(mark: str, pid: int) -> str:
    return f"{PREFIX}{mark}-{pid}-{host.process_started(pid)}"


def marked(bases: Collection[Path | None], mark: str) -> list[Path]:
    """Find the halls of one bench."""
    return [hall for base in bases if base is not None for hall in base.glob(f"{PREFIX}{mark}-*")]


def remove_stale(base: Path) -> None:
    """Take down what killed nurseries left. An empty hall alone is no sign: its nursery may just be idle."""
    for hall in base.glob(f"{PREFIX}*"):
        _, _, owner = hall.name.removeprefix(PREFIX).partition("-")
        pid, _, started = owner.partition("-")
        if pid.isdigit() and host.look(int(pid), started) is Process.GONE:
            remove(hall)


def rooms(hall: Path) -> list[Path]:
    try:
        return [room for room in hall.iterdir() if room.is_dir()]
    except OSError:
        return []


def remove(hall: Path) -> None:
    for room in rooms(hall):
        cgroups.remove(room)
    cgroups.remove(hall)
