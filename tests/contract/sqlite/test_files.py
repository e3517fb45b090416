"""What can be wrong with a file: each trouble is one clear sentence with its cure, and nothing is half-written."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.backdoor import SqliteBackdoor
from tests.support.builders import birth, claim_jobs, new_job, put, running
from tests.support.processes import ROOT

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.liveness import Session
from unstuck.errors import LedgerError, LedgerReplaced, LedgerUnavailable, RefusedValue, SchemaMismatch
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.recovery import GuardSilent
from unstuck.ledger.sqlite import database
from unstuck.ledger.sqlite.ledger import SqliteLedger, path_of

NOBODY = 65534


def open_at(path: Path) -> SqliteLedger:
    return SqliteLedger(Settings(url=f"sqlite:///{path}"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def ledger(path: Path) -> SqliteLedger:
    ledger = open_at(path)
    ledger.migrate()
    return ledger


def test_every_file_of_the_ledger_is_its_owners_alone(ledger: SqliteLedger, path: Path) -> None:
    put(ledger)
    files = {name: stat.S_IMODE(os.stat(path.parent / name).st_mode) for name in os.listdir(path.parent)}
    assert files == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db-lock"), 384)


def test_writes_are_durable_before_they_are_acknowledged(ledger: SqliteLedger) -> None:
    with ledger.db.write() as cursor:
        facts = [cursor.connection.pragma(name) for name in ("journal_mode", "synchronous", "foreign_keys")]
    assert facts == ["wal", 2, 1]


def test_a_stranger_who_locks_the_file_is_waited_for(ledger: SqliteLedger, path: Path) -> None:
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(1.5, lambda: stranger.execute("COMMIT"))
    timer.start()
    put(ledger)
    timer.join()
    assert ledger.jobs.count() == {"pending": 1}
    stranger.close()


def test_a_stranger_who_never_lets_go_ends_our_patience_and_not_our_reading(ledger: SqliteLedger, path: Path) -> None:
    ledger.db.patience_s = 0.4
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked by someone else"):
        put(ledger)
    assert ledger.jobs.count() == {}
    stranger.execute("ROLLBACK")
    put(ledger)
    stranger.close()


def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 500)
    ledger = open_at(path)
    for verb in (ledger.migrate, ledger.check_schema, ledger.jobs.count):
        with pytest.raises(LedgerError, match="is not a SQLite database"):
            verb()
    assert path.read_bytes() == b"Dear diary, " * 500


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "missing" / "jobs.db")
    for verb in (ledger.migrate, ledger.jobs.count):
        with pytest.raises(LedgerError, match=r"directory .*missing does not exist\. Create it"):
            verb()


def test_reading_a_ledger_that_was_never_made_creates_no_file(path: Path) -> None:
    with pytest.raises(SchemaMismatch, match="unstuck migrate"):
        open_at(path).check_schema()
    assert not path.exists()


def test_a_directory_in_place_of_the_file_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(LedgerError, match=r"\."):
        open_at(path).migrate()


AS_NOBODY = """
import os, sys
from unstuck.config import Settings
from unstuck.errors import UnstuckError
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.sqlite.ledger import SqliteLedger
import unstuck.ledger.sqlite.enqueue
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
ledger = SqliteLedger(Settings(url=sys.argv[1]))
try:
    ledger.migrate() if sys.argv[2] == "migrate" else ledger.jobs.enqueue([NewJob("add", "default", b"")])
except UnstuckError as error:
    print(type(error).__name__, error)
"""


def as_nobody(path: Path, verb: str) -> str:
    command = [sys.executable, "-c", AS_NOBODY, f"sqlite:///{path}", verb]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that any user can reach."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="unstuck-test-"))
    folder.chmod(0o755)
    yield folder  # type: ignore[misc]
    import shutil

    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_directory_that_may_not_be_written_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    answer = as_nobody(open_folder / "jobs.db", "migrate")
    assert answer.startswith("LedgerError")
    assert "cannot be opened" in answer
    assert "write access" in answer


def test_a_file_of_somebody_else_is_refused_with_the_cure(open_folder: Path) -> None:
    path = open_folder / "jobs.db"
    ledger = open_at(path)
    ledger.migrate()
    ledger.close()
    for name in os.listdir(open_folder):
        (open_folder / name).chmod(0o444)
    open_folder.chmod(0o555)
    answer = as_nobody(path, "enqueue")
    assert answer.startswith("LedgerError")
    assert "write access" in answer


FULL = """
import resource, sys
from unstuck.config import Settings
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.sqlite.ledger import SqliteLedger
ledger = SqliteLedger(Settings(url=sys.argv[1]))
ledger.migrate()
ledger.jobs.enqueue([NewJob("add", "default", b"before")])
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
try:
    ledger.jobs.enqueue([NewJob("add", "default", b"x" * 100_000)] * 20)
except LedgerUnavailable as error:
    print("told:", error)
print(ledger.jobs.count())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger.jobs.enqueue([NewJob("add", "default", b"after")])
print(ledger.jobs.count())
"""


def test_a_full_disk_refuses_the_batch_whole_and_is_no_trouble_once_there_is_space(path: Path) -> None:
    command = [sys.executable, "-c", FULL, f"sqlite:///{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told, before, after = done.stdout.splitlines()
    assert told.startswith("told:")
    assert "full" in told
    assert "Free some space" in told
    assert (before, after) == ("{'pending': 1}", "{'pending': 2}")


def test_a_ledger_deleted_under_our_feet_is_noticed_and_not_written_into_the_void(
    ledger: SqliteLedger, path: Path
) -> None:
    put(ledger)
    for name in os.listdir(path.parent):
        (path.parent / name).unlink()
    for verb in (lambda: put(ledger), ledger.jobs.count, ledger.migrate):
        with pytest.raises(LedgerReplaced, match="was deleted or moved"):
            verb()
    # Nothing is left that knows of it: who comes now begins anew, and whoever knew the old one stays away.
    other = open_at(path)
    other.migrate()
    assert put(other) == 1
    with pytest.raises(LedgerReplaced, match="another ledger"):
        put(ledger)
    other.close()


def test_a_new_client_begins_no_empty_ledger_where_one_was_deleted(ledger: SqliteLedger, path: Path) -> None:
    put(ledger)
    ledger.close()
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    client = open_at(path)
    for verb in (client.check_schema, client.jobs.count, client.migrate):
        with pytest.raises(LedgerReplaced, match=r"was deleted or moved.*Put the file back.*delete \S+-lock too"):
            verb()
    assert not path.exists()
    path.with_name(path.name + "-lock").unlink()
    client.migrate()
    assert put(client) == 1


LEAVES_ITS_COMMITS_IN_THE_WAL = """
import os, sys
from tests.contract.sqlite.test_files import open_at
from tests.support.builders import put
from pathlib import Path

ledger = open_at(Path(sys.argv[1]))
ledger.migrate()
put(ledger)
os._exit(0)
"""


def test_a_ledger_that_is_put_back_while_another_is_opened_is_not_mixed_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens the WAL by name with the first statement: here it is that of another file than the database."""
    subprocess.run([sys.executable, "-c", LEAVES_ITS_COMMITS_IN_THE_WAL, str(path)], cwd=ROOT, check=True)
    ours = open_at(path)
    put(ours)
    away = move_ledger(path, path.with_name("away.db"))
    path.with_name("jobs.db-lock").unlink()
    other = open_at(path)
    other.migrate()
    other.close()

    class PutsBack(apsw.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if away.exists():
                move_ledger(path, path.with_name("other.db"))
                move_ledger(away, path)

    monkeypatch.setattr(database.apsw, "Connection", PutsBack)
    with pytest.raises(LedgerReplaced):
        put(ours)
    put(ours)
    assert len(ours.jobs.list(JobFilter())) == 3
    with ours.db.read() as cursor:
        assert list(cursor.execute("PRAGMA integrity_check")) == [("ok",)]
    ours.close()


def move_ledger(path: Path, to: Path) -> Path:
    for suffix in ("-shm", "-wal", ""):
        if (file := path.with_name(path.name + suffix)).exists():
            file.rename(to.with_name(to.name + suffix))
    return to


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = SqliteLedger(Settings(url="sqlite:///jobs.db"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.migrate()
    assert (tmp_path / "jobs.db").exists()
    assert not (tmp_path / "elsewhere" / "jobs.db").exists()


def test_two_names_of_one_file_are_one_ledger(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert path_of(f"sqlite:///{tmp_path}/link/jobs.db") == path_of(f"sqlite:///{tmp_path}/real/jobs.db")
    assert path_of("sqlite:////tmp/with%20space.db").name == "with space.db"


def test_a_database_of_somebody_elses_making_can_hold_the_ledger_too(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE invoices (id INTEGER PRIMARY KEY)")
    connection.close()
    ledger = open_at(path)
    with pytest.raises(SchemaMismatch, match="unstuck migrate"):
        ledger.check_schema()
    ledger.migrate()
    ledger.check_schema()


def test_a_number_that_does_not_fit_is_refused(ledger: SqliteLedger) -> None:
    with pytest.raises(RefusedValue, match="64 bits"):
        ledger.jobs.cancel([2**70], "ops")


def test_after_a_restart_of_the_machine_the_old_clock_means_nothing(ledger: SqliteLedger, path: Path) -> None:
    """The boot clock began again at zero: what a job started in the boot before may lie in its future."""
    ledger.workers.register(birth("w1"))
    running(ledger)
    meddler = SqliteBackdoor(path)
    meddler.rows("UPDATE unstuck_workers SET boot_id = 'the boot before'")
    meddler.age_beat("w1", 50)
    meddler.rows("UPDATE unstuck_jobs SET started_boot_s = started_boot_s + 1e6, started_at = started_at - 50")
    [watched] = ledger.recovery.watch()
    assert watched.boot_id == "the boot before" != host.boot_id()
    assert watched.silent_s == pytest.approx(50, abs=5)
    assert watched.session is Session.UNKNOWN
    [held] = ledger.workers.held("w1")
    assert held.running_s == pytest.approx(50, abs=5)
    assert [job.job_id for job in ledger.recovery.stale(30.0)] == [held.job_id]
    assert ledger.recovery.settle("w1", [], [], GuardSilent(30.0)) == set()


def test_a_ticket_of_the_boot_before_is_void(ledger: SqliteLedger, path: Path) -> None:
    assert ledger.maintenance.take_ticket("sweep", 3600.0)
    meddler = SqliteBackdoor(path)
    meddler.rows("UPDATE unstuck_tickets SET boot_id = 'the boot before', until_boot_s = until_boot_s + 1e6")
    assert ledger.maintenance.take_ticket("sweep", 3600.0)


def test_the_wal_stays_short_while_readers_come_and_go(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 50)
    monkeypatch.setattr(database, "RESTART_PAGES", 300)
    ended = threading.Event()

    def read() -> None:
        reader = open_at(path)
        while not ended.is_set():
            reader.jobs.count()
            reader.jobs_seen = reader.queues.list()  # type: ignore[attr-defined]
        reader.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for _ in range(150):
            ledger.jobs.enqueue([new_job(payload=b"x" * 3000) for _ in range(20)])
    finally:
        ended.set()
        for thread in readers:
            thread.join()
    written_pages = 150 * 20
    assert os.stat(f"{path}-wal").st_size / 4096 < written_pages / 2


def test_a_reader_who_never_ends_does_not_stop_the_writers(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 10)
    monkeypatch.setattr(database, "RESTART_PAGES", 20)
    tried: list[int] = []
    checkpoint = apsw.Connection.wal_checkpoint

    class Watched(apsw.Connection):
        def wal_checkpoint(self, *args: Any, **more: Any) -> Any:
            tried.append(more["mode"])
            return checkpoint(self, *args, **more)

    monkeypatch.setattr(apsw, "Connection", Watched)
    ledger.close()
    monkeypatch.setattr(database, "RESTART_BUSY_S", 0.05)
    put(ledger)
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN")
    stranger.execute("SELECT count(*) FROM unstuck_jobs").fetchall()
    for _ in range(30):
        ledger.jobs.enqueue([new_job(payload=b"x" * 3000)] * 5)
    # To wait for the reader keeps the write lock from everybody else: once per so much growth, not once per commit.
    pages = os.stat(f"{path}-wal").st_size // 4096
    assert 1 <= tried.count(apsw.SQLITE_CHECKPOINT_RESTART) <= pages / 20 < len(tried)
    stranger.execute("COMMIT")
    stranger.close()
    assert ledger.jobs.count() == {"pending": 151}
    ledger.workers.register(birth("w1"))
    assert len(claim_jobs(ledger, limit=200)) == 151
