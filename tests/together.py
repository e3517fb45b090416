"""Keep tests that share a server or a browser of their file in one process: else each process starts its own.

A plugin of pytest, given with `-p tests.together` beside `-n`. Everything else goes to whoever is free. When a process
dies, the test that it was in has failed, and the others of its file go to its heir.
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARING = ('scope="module"', "door: Door")
"""How a file says so: by a fixture of its own, or by the door of `tests/acceptance/conftest.py`."""
DIALECTS = ("sqlite", "postgres")


class Together(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        if not _shares(path):
            return nodeid
        # Each database has a server of its own.
        return f"{path} {next((dialect for dialect in DIALECTS if dialect in name.rpartition('[')[2]), '')}"

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
    return Together(config, log)


@cache
def _shares(path: str) -> bool:
    text = Path(path).read_text()
    return any(word in text for word in SHARING)
