"""What the doctor finds on SQLite alone: the WAL and its readers, a file that is mostly empty, bells."""

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.support.builders import birth, done, put, running, turn
from tests.support.doctor import CALM, codes

from unstuck import config
from unstuck.client.doctor.facts import Thresholds
from unstuck.ledger.contract import Ledger
from unstuck.ledger.sqlite.ledger import SqliteLedger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def settings(path: Path) -> config.Settings:
    return config.build({"url": f"sqlite:///{path}"})


@pytest.fixture
def file(settings: config.Settings) -> Iterator[Ledger]:
    ledger = SqliteLedger(settings)
    ledger.migrate()
    yield ledger
    ledger.close()


def test_a_reader_that_keeps_the_wal_from_being_emptied(file: Ledger, path: Path, settings: config.Settings) -> None:
    file.workers.register(birth("w1", **CALM))
    reader = apsw.Connection(str(path))
    reader.execute("begin; select count(*) from unstuck_jobs").fetchall()
    for _ in range(12):
        put(file, payload=b"x" * 1_000_000)
    assert codes(file, settings) >= {"wal-reader"}
    assert "wal-large" in codes(file, settings, Thresholds(wal_bytes=2**20))
    reader.close()
    assert "wal-reader" not in codes(file, settings)


def test_a_file_that_is_mostly_empty(file: Ledger, settings: config.Settings) -> None:
    file.workers.register(birth("w1", **CALM))
    job = running(file, payload=b"x" * 4_000_000)
    turn(file, done=[done(job)])
    limits = Thresholds(free_bytes=2**20)
    assert "free-space" not in codes(file, settings, limits)
    assert file.maintenance.prune(0.0) == 1
    assert "free-space" in codes(file, settings, limits)


def test_a_bell_that_cannot_be_reached(file: Ledger, settings: config.Settings) -> None:
    file.workers.register(birth("w1", **CALM))
    bell = file.workers.listen("w1")
    assert "bell-unreachable" not in codes(file, settings)
    bell.close()
    assert "bell-unreachable" in codes(file, settings)
