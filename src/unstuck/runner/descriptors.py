"""Bound the descriptors of a runner, and notice cheaply when its jobs leave theirs open.

The kernel always gives the lowest free number. So the number of a fresh descriptor tells how many are open at least:
what is leaked fills every gap in the end.
"""

import resource
from os import close, dup

LOOK_EVERY = 8
"""Jobs between two looks: a look costs two system calls. A job that failed is followed by a look in any case."""
MANY = 256
"""So many more than at first are a leak, and not somebody's pool of connections."""
SHARE = 4
"""Or this part of the limit, where that is less: the next job must not be the one to suffer."""


def bound(max_open_files: int) -> None:
    """Set how many descriptors we and what we start may hold; 0 leaves it as it is."""
    if max_open_files:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY:
            max_open_files = min(max_open_files, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, hard))
        except (OSError, ValueError):
            pass


class LeakWatch:
    """Watches the descriptors of this process from now on."""

    def __init__(self, probe: int) -> None:
        self._probe = probe
        """A descriptor of our own that can be duplicated."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        many = MANY if limit == resource.RLIM_INFINITY else min(MANY, limit // SHARE)
        self._first = self._lowest() or 0
        self._most = self._first + max(1, many)
        self._jobs = 0

    def leaked(self, *, failed: bool) -> int:
        """Say after a job how many descriptors were left open, 0 for none worth a word; -1 when there are no more."""
        self._jobs += 1
        if self._jobs % LOOK_EVERY and not failed:
            return 0
        lowest = self._lowest()
        if lowest is None:
            return -1
        return lowest - self._first if lowest > self._most else 0

    def _lowest(self) -> int | None:
        try:
            found = dup(self._probe)
        except OSError:
            return None
        close(found)
        return found
