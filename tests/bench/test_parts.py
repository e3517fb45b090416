"""Every part of the benchmark runs and returns a table. Its figures are not looked at: it is too short for them."""

from pathlib import Path

import pytest
from bench.databases import IN_MEMORY, Database, NotDurable, Sqlite, open_databases
from bench.parts import PARTS, TINY

WITHOUT_WORKERS = ("machine", "enqueue", "table-size", "stale-check", "runner-wire")
"""Parts of a second. The others start workers, servers or brokers, several times."""


@pytest.fixture
def sqlite(tmp_path: Path) -> list[Database]:
    return [Sqlite(tmp_path)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITHOUT_WORKERS else pytest.mark.long) for name in PARTS]
)
def test_a_part_returns_a_table(sqlite: list[Database], name: str) -> None:
    table = PARTS[name](sqlite, TINY)
    assert table.key == name
    assert table.rows
    assert all(len(figures) == len(table.columns) for figures in table.rows.values())
    assert table.text().startswith(table.title)


def test_a_folder_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.databases._file_system", lambda _: IN_MEMORY[0])
    with pytest.raises(NotDurable, match="Set TMPDIR to a folder on a disk"), open_databases(["sqlite"]):
        pass
    with open_databases(["sqlite"], in_memory=True) as [sqlite]:
        assert "survives the end of the process only" in sqlite.durability()
