"""Keep tests that share a server or a browser of their file in one process: else each process starts its own.

A plugin of pytest, given with `-p tests.together` beside `-n`. Everything else goes to whoever is free.
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

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


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)


@cache
def _shares(path: str) -> bool:
    text = Path(path).read_text()
    return any(word in text for word in SHARING)
