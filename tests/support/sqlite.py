"""Give a SQLite ledger with its tables and nothing in them: a copy of one that each process migrates once."""

import tempfile
from functools import cache
from pathlib import Path

from unstuck.config import Settings
from unstuck.ledger.sqlite.ledger import SqliteLedger

OWNERS_ONLY = 0o600
"""As the ledger itself makes its file."""


def ready_sqlite(folder: Path) -> str:
    """Put a ledger into this folder, and give its address."""
    path = folder / "jobs.db"
    path.touch(OWNERS_ONLY)
    path.write_bytes(_model())
    return f"sqlite:///{path}"


@cache
def _model() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"
        ledger = SqliteLedger(Settings(url=f"sqlite:///{path}"))
        ledger.migrate()
        ledger.close()
        # Whoever closes last leaves everything in this one file.
        assert not path.with_name("jobs.db-wal").exists()
        return path.read_bytes()
