"""Options, order and fixtures of every test; a PostgreSQL server of our own starts when the first test asks for it."""

import gc
import random
import re
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from tests.support import hosts, process_logs, run_guard
from tests.support.hosts import Host
from tests.support.log_state import LogState
from tests.support.postgres import PgServer, start_postgres

from unstuck.config import Settings
from unstuck.ledger.postgres.ledger import PostgresLedger

QT = Path(__file__).parent / "desktop"

# Whoever started us in the background had Ctrl-C ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

DATABASE = re.compile(r"(?<=[\[-])(?:sqlite|postgresql|postgres)(?=[\]-])")
"""How the id of a test with parameters names its database."""
LONG = ("tests/simulation/", "tests/chaos/", "tests/crash/test_clock_steps.py", "tests/crash/test_watchdog.py")
"""Tests of ten seconds and more run first: at the end, one of them would keep one processor busy alone."""
SHORT = "tests/unit/"
"""Tests of a moment run last: they fill the time in which others end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--databases",
        choices=["sqlite", "main", "all"],
        default="main",
        help="`main` (default): the contract and tests marked both_databases on both, others on SQLite if they can; "
        "`sqlite`: nothing on PostgreSQL; `all`: everything on each database that it knows",
    )
    parser.addoption("--seed", default="1", help="seed of tests that draw, or `random` for a new one (default: 1)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    run_guard.start()
    config.pluginmanager.register(process_logs, "process-logs")
    fixed = config.option.seed == "1"
    if config.option.seed == "random":
        # Drawn once: the processes of one run inherit the number.
        config.option.seed = str(random.SystemRandom().randrange(2, 1_000_000))
    if not fixed and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = config.option.seed
    # A busy machine is no reason to fail, so there is no limit of time.
    hypothesis.settings.register_profile(
        "unstuck", deadline=None, derandomize=fixed, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("unstuck")


def pytest_report_header(config: pytest.Config) -> str:
    return f"databases: {config.option.databases}, --seed {config.option.seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("Seed", f"--seed {item.config.option.seed}"))
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named on the command line runs, whatever its database is.
    if config.option.databases != "all" and not any("::" in word for word in config.args):
        known = {item.nodeid for item in items}
        left_out = [item for item in items if not _runs(item, known, config.option.databases)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if config.getoption("dist", "no") == "no":
        return
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _runs(item: pytest.Item, known: set[str], databases: str) -> bool:
    """Return whether a test runs: if it knows several databases, the options and its marks choose."""
    path, _, name = item.nodeid.partition("::")
    if databases == "sqlite":
        return not _needs_postgres(item)
    if path.startswith("tests/contract/") or item.get_closest_marker("both_databases"):
        return True
    found = DATABASE.search(name)
    wanted = ("postgresql", "postgres") if item.get_closest_marker("on_postgresql") else ("sqlite",)
    # A test that knows one database alone runs on it.
    return found is None or found[0] in wanted or not any(DATABASE.sub(one, item.nodeid) in known for one in wanted)


def _needs_postgres(item: pytest.Item) -> bool:
    if item.nodeid.startswith("tests/contract/postgres/"):
        return True
    found = DATABASE.search(item.nodeid)
    return "pg_server" in getattr(item, "fixturenames", ()) or (found is not None and found[0] != "sqlite")


def _group(item: pytest.Item) -> str:
    """Return what tests must share to run in one process: a fixture of their file, such as a server or a browser."""
    found = getattr(item, "_fixtureinfo", None)
    made = [] if found is None else [known[-1] for known in found.name2fixturedefs.values()]
    if not any(fixture.scope in ("module", "class") for fixture in made):
        return ""
    path, _, name = item.nodeid.partition("::")
    # Each database has a server of its own.
    database = DATABASE.search(name)
    return f"{path} {database[0]}" if database else path


def _turn(item: pytest.Item) -> float:
    """Return when a test runs, from -1 to 2: mixed, so that those that wait run beside those that calculate, and the
    same in every process and every run."""
    group = item.get_closest_marker("xdist_group")
    turn = zlib.crc32((group.args[0] if group else item.nodeid).encode()) / 2**32
    if item.nodeid.startswith(SHORT):
        return 1 + turn
    if item.nodeid.startswith(LONG):
        return turn - 1
    # A group is long, too: none of them may be the last.
    return turn / 2 if group else turn


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report: object) -> Generator[None, dict[str, object], dict[str, object]]:
    """Remove the group that pytest-xdist adds to the id of a test: with it, the id cannot be given to pytest again."""
    data = yield
    if data and "@" in (nodeid := str(data.get("nodeid", ""))) and nodeid.rfind("@") > nodeid.rfind("]"):
        data["nodeid"] = nodeid.rpartition("@")[0]
    return data


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """The seed of a test that draws: fixed, or as `--seed` says."""
    return int(pytestconfig.option.seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load no Qt into a process that runs other tests, unless told to: their threads may collect garbage of Qt."""
    if collection_path != QT:
        return None
    asked = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    return None if all(path.is_relative_to(QT) for path in asked) else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Count what a failed test left open against that test.

    pytest keeps its traceback until the next test runs, and with it every connection that the test did not come to
    close. The warning about them would fail the next test."""
    if hasattr(sys, "last_value"):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()


@pytest.fixture(autouse=True)
def log_state() -> Iterator[None]:
    """Fail a test that changes how the process logs and leaves it so: the next test would miss lines."""
    before = LogState.now()
    yield
    assert LogState.now() == before, "this test changed how the process logs; ask for the fixture restored_logging"


@pytest.fixture
def restored_logging(log_state: None) -> Iterator[None]:
    """Restore what a command or `logs.setup` changes in the process that runs it."""
    before = LogState.now()
    yield
    before.restore()


@pytest.fixture(scope="session")
def other_hosts() -> None:
    if not hosts.can_enter(Host(host="elsewhere")):
        pytest.skip("may not give a process another host name (root, Linux)")


@pytest.fixture(scope="session")
def other_boots() -> None:
    if not hosts.can_enter(Host(boot_id="another")):
        pytest.skip("may not give a process another boot id (root, Linux)")


@pytest.fixture(scope="session")
def own_mounts() -> None:
    if not hosts.can_enter(Host(boot_id="another")):
        pytest.skip("may not give a process mounts of its own (root, Linux)")


@pytest.fixture(scope="session")
def networks() -> None:
    if not hosts.can_make_networks():
        pytest.skip("may not make network namespaces (root, Linux, iproute2)")


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PgServer]:
    """One server per test process; tests that stop it must start it again."""
    with start_postgres() as server:
        yield server


@pytest.fixture
def pg_url(pg_server: PgServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a fresh, empty database; it has the ledger's tables where the ledger is asked for as well."""
    url = pg_server.new_ledger() if "pg_ledger" in request.fixturenames else pg_server.new_database()
    yield url
    pg_server.drop_database(url)


@pytest.fixture
def ready_pg_url(pg_server: PgServer) -> Iterator[str]:
    """The address of a database with the ledger's tables and nothing in them."""
    url = pg_server.acquire()
    yield url
    pg_server.release(url)


@pytest.fixture
def untouched() -> None:
    """Asked for by who wants to see the tables being made, where others find them there."""


@pytest.fixture
def pg_ledger(pg_url: str) -> Iterator[PostgresLedger]:
    """A ledger on PostgreSQL with its tables and nothing in them."""
    ledger = PostgresLedger(Settings(url=pg_url))
    yield ledger
    ledger.close()
