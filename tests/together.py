"""Keep tests that share a server or a browser of their file in one process: else each process starts its own.

A plugin of pytest, given with `-p tests.together` beside `-n`. Everything else goes to whoever is free, in an order
that mixes those who wait with those who calculate: folder by folder, the machine would be idle in one and crowded in
the next. When a process dies, the test that it was in has failed, and the others of its file go to its heir.
"""

import zlib
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARING = ('scope="module"', "door: ApiClient", "browser: Browser", "http: httpx.Client")
"""How a file says so: by a fixture of its own, or by a door or the browser of `tests/support/server_fixtures.py`."""
DIALECTS = ("sqlite", "postgres")
LONG = ("tests/simulation/", "tests/crash/test_worker_health.py::test_a_lone_worker", "tests/crash/test_clock_steps.py")
"""Tests of half a minute and more: begun late, one of them would keep one processor busy when all else is done."""
SHORT = "tests/unit/"
"""Tests of a moment come last: they fill the time in which others end."""


class Together(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        scope = self._split_scope(self.registered_collections[node][item_index])
        super().mark_test_complete(node, item_index, duration)
        # What is over is counted again with each test: in the end that is thousands times thousands.
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]

    def remove_node(self, node: WorkerController) -> str | None:
        # Else whoever takes over the file would run the test again that ended the process, and end too.
        workload = self.assigned_work.pop(node)
        left = [(unit, nodeid) for unit in workload.values() for nodeid, done in unit.items() if not done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A process begins with a test when it knows the next one, or that there is none: an heir would wait for ever.
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    config.option.loadscopereorder = False
    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))


def scope_of(nodeid: str) -> str:
    """Name what goes to one process: a file on one database, or one test."""
    path, _, name = nodeid.partition("::")
    if not _shares(path):
        return nodeid
    # Each database has a server of its own.
    return f"{path} {next((dialect for dialect in DIALECTS if dialect in name.rpartition('[')[2]), '')}"


def turn_of(nodeid: str) -> float:
    """Say when a test has its turn, from 0 to 2: by chance, yet the same in every process and every run."""
    scope = scope_of(nodeid)
    turn = zlib.crc32(scope.encode()) / 2**32
    if nodeid.startswith(SHORT):
        return 1 + turn
    # Whole files take long, too: none of them may be the last.
    return turn / 2 if scope != nodeid or nodeid.startswith(LONG) else turn


@cache
def _shares(path: str) -> bool:
    text = Path(path).read_text()
    return any(word in text for word in SHARING)
