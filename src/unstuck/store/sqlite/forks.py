"""Close the SQLite files of every ledger before a fork, so that no child inherits an open one.

SQLite keeps its locks per process in memory that a child would inherit without the locks themselves. A
child that uses, opens again or even closes such a file can damage it. So nothing may be open at the
moment of a fork: the parent closes, forks, and both open again when they next need the file.
"""

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


_known: "weakref.WeakSet[Forkable]" = weakref.WeakSet()
_forking: list[Forkable] = []
_guard = threading.Lock()


def watch_forks(thing: Forkable) -> None:
    with _guard:
        _known.add(thing)


def _before() -> None:
    with _guard:
        _forking[:] = list(_known)
    for thing in _forking:
        thing.before_fork()


def _in_parent() -> None:
    for thing in _forking:
        thing.after_fork_in_parent()
    _forking.clear()


def _in_child() -> None:
    global _guard
    _guard = threading.Lock()
    for thing in _forking:
        thing.after_fork_in_child()
    _forking.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
