"""Whatever is typed, the answer is one sentence that names the cure, and nothing is half-written."""

import os
import signal
import subprocess
import sys

import pytest
from tests.support.cli import COMMAND, Cli

USAGE = [
    (["nosuch"], "No such command 'nosuch'"),
    (["jobs", "--nosuch"], "No such option: --nosuch"),
    (["jobs", "--state", "runing"], "Did you mean 'running'"),
    (["jobs", "--limit", "0"], "--limit"),
    (["jobs", "--limit", "many"], "--limit"),
    (["jobs", "--older-than", "5x"], "--older-than must be a duration like '30s'"),
    (["jobs", "--newer-than", "-5s"], "--newer-than must be"),
    (["jobs", "--older-than", "nan"], "between 0 and ten years"),
    (["job"], "Missing argument 'ID'"),
    (["job", "abc"], "'abc' is not a job id"),
    (["job", "1.5"], "is not a job id"),
    (["job", ""], "is not a job id"),
    (["job", "１"], "is not a job id"),
    (["logs", "x"], "is not a job id"),
    (["why"], "Missing argument 'JOB'"),
    (["why", "-1"], "No such option: -1"),
    (["why", "last"], "'last' is not a job id"),
    (["quarantine", "list", "--limit", "0"], "--limit"),
    (["quarantine", "lits"], "No such command 'lits'"),
    (["cancel"], "Give the numbers of jobs"),
    (["cancel", "1", "two"], "'two' is not a job id"),
    (["retry"], "Give the numbers of jobs, or --error"),
    (["retry", "1", "--state", "failed"], "not both"),
    (["stale", "--fail", "--requeue"], "either --fail or --requeue"),
    (["stale", "--older-than", "soon"], "--older-than must be a duration"),
    (["prune", "--state", "running"], "A running job is not finished"),
    (["pause"], "Give the name of one queue, or --all"),
    (["pause", "default", "--all"], "Give the name of one queue, or --all"),
    (["workers", "drain"], "Missing argument"),
    (["worker"], "Name the app as module:attribute"),
    (["worker", "app:app", "--concurrency", "0"], "--concurrency"),
    (["worker", "app:app", "--queues", ","], "names no queue"),
    (["up", "app:app", "--workers", "0"], "--workers"),
    (["jobs", "--log-level", "loud"], "Log level must be one of"),
    (["jobs", "--log-format", "xml"], "Log format must be console or json"),
    (["enqueue"], "Missing argument 'TASK'"),
    (["enqueue", "add", "hello"], """To pass it as text, write '"hello"'"""),
    (["enqueue", "add", "{1}"], "is not JSON"),
    (["enqueue", "add", "NaN"], "NaN is not JSON"),
    (["enqueue", "add", "[" * 100_000], "is not JSON"),
    (["enqueue", "add", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
    (["enqueue", "add", "--kwargs", "{"], "--kwargs, '{', is not JSON"),
    (["enqueue", "add", "--prioritty", "3"], "There is no option --prioritty"),
    (["enqueue", "add", "--priority", "1001"], "priority must be a whole number from -1000 to 1000"),
    (["enqueue", "add", "--delay", "tomorrow"], "delay must be a duration"),
    (["enqueue", "add", "--queue", "no queue"], "is not a usable name"),
    (["enqueue", "add", "--unique-key", ""], "unique_key must be text"),
    (["enqueue", "add", "--wait", "--timeout", "x"], "--timeout must be a duration"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE, ids=[" ".join(words)[:40] for words, _ in USAGE])
def test_a_command_that_cannot_be_meant(arguments: list[str], sentence: str, shop: Cli) -> None:
    assert sentence in shop.refused(2, *arguments)
    assert list(shop.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("jobs.db", "is not a ledger URL"),
        ("", "is not a ledger URL"),
        ("redis://localhost", "redis:// is not a ledger that Unstuck knows"),
        ("postgress://localhost/x", "Did you mean 'postgres'"),
        ("sqlite://jobs.db", "names no file"),
        ("sqlite:///:memory:", "cannot be shared"),
    ],
)
def test_an_address_that_names_no_ledger(url: str, sentence: str, shop: Cli) -> None:
    assert sentence in shop.refused(1, "jobs", "--url", url)
    assert sentence in shop.refused(1, "enqueue", "add", "--url", url)


@pytest.mark.parametrize("command", ["jobs", "workers", "queues", "stale", "prune", "reaper --once", "pause --all"])
def test_looking_never_creates_a_ledger(command: str, shop: Cli) -> None:
    sentence = shop.refused(1, *command.split())
    assert "There is no ledger at" in sentence
    assert "unstuck migrate" in sentence
    assert list(shop.folder.iterdir()) == []


@pytest.mark.parametrize("command", [["jobs"], ["migrate"], ["enqueue", "add", "1"]])
class TestAPlaceThatIsNoLedger:
    def test_a_directory(self, command: list[str], shop: Cli) -> None:
        (shop.folder / "jobs.db").mkdir()
        assert "jobs.db" in shop.refused(1, *command)

    def test_a_file_that_is_no_database(self, command: list[str], shop: Cli) -> None:
        path = shop.folder / "jobs.db"
        path.write_bytes(b"This is a diary, not a database. " * 100)
        assert "is not a SQLite database" in shop.refused(1, *command)
        assert path.read_bytes().startswith(b"This is a diary")

    def test_a_database_of_someone_else(self, command: list[str], shop: Cli) -> None:
        import apsw

        other = apsw.Connection(str(shop.folder / "jobs.db"))
        other.execute("create table heartbeats (mine text)")
        other.execute("insert into heartbeats values ('kept')")
        other.close()
        shop.refused(1, *command)
        again = apsw.Connection(str(shop.folder / "jobs.db"))
        assert list(again.execute("select mine from heartbeats")) == [("kept",)]
        again.close()

    def test_a_folder_that_does_not_exist(self, command: list[str], shop: Cli) -> None:
        sentence = shop.refused(1, *command, "--url", f"sqlite:///{shop.folder}/no/such/jobs.db")
        assert "/no/such" in sentence


def test_an_empty_file_is_no_ledger_yet(shop: Cli) -> None:
    (shop.folder / "jobs.db").touch()
    assert "unstuck migrate" in shop.refused(1, "jobs")
    assert shop.run("migrate").code == 0
    assert shop.run("jobs").code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["job", "1"], "Job 1 does not exist"),
        (["job", "0"], "Job 0 does not exist"),
        (["job", "9223372036854775808"], "does not exist"),
        (["job", "9" * 400], "does not exist"),
        (["logs", "77"], "Job 77 does not exist"),
        (["pause", "nosuch"], "There is no queue 'nosuch'"),
        (["resume", "nosuch"], "There is no queue 'nosuch'"),
        (["purge", "nosuch", "--yes"], "There is no queue 'nosuch'"),
        (["workers", "drain", "nobody"], "There is no worker 'nobody'"),
        (["workers", "stop", ""], "There is no worker ''"),
        (["jobs", "--worker", "nobody"], "There is no worker 'nobody'"),
        (["enqueue", "nosuch", "1"], "There is no task 'nosuch'"),
        (["jobs", "--app", "nosuch_module:app"], "There is no module 'nosuch_module'"),
        (["jobs", "--app", "app.py"], "names a file, not a module"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_name_that_does_not_exist(arguments: list[str], sentence: str, shop: Cli) -> None:
    assert shop.run("migrate").code == 0
    assert sentence in shop.refused(1, *arguments)


def test_close_names_get_a_did_you_mean(shop: Cli) -> None:
    shop.worker(queues=("default", "scrapes"))
    assert "Did you mean 'scrapes'" in shop.refused(1, "pause", "scrape")
    assert "Did you mean 'crawl'" in shop.refused(1, "enqueue", "craw")
    assert "Did you mean 'scrapes'" in shop.refused(1, "enqueue", "add", "1", "--queue", "scrapess")
    assert "Did you mean 'ada'" in shop.refused(1, "workers", "stop", "adaa")
    said = shop.run("jobs", "--error", "worker_crash")
    assert said.code == 0
    assert "Did you mean 'WORKER_CRASHED'" in said.err


def test_a_payload_over_the_limit_is_refused_whole(shop: Cli) -> None:
    shop.worker()
    sentence = shop.refused(1, "enqueue", "add", f'"{"x" * 5000}"', UNSTUCK_MAX_PAYLOAD_BYTES="1000")
    assert "over the limit of 1,000" in sentence
    assert shop.run("jobs", "--json").json == []


def test_a_database_server_that_is_not_there(shop: Cli) -> None:
    url = f"postgresql://u:secret@localhost/x?host={shop.folder}"
    for command in (["jobs"], ["enqueue", "add"], ["migrate"]):
        sentence = shop.refused(1, *command, "--url", url)
        assert "secret" not in sentence


def test_a_broken_app_shows_its_own_trouble(shop: Cli) -> None:
    (shop.folder / "broken.py").write_text("import nothing_like_this\n")
    said = shop.run("jobs", "--app", "broken:app")
    assert said.code == 1
    assert said.err.startswith("unstuck: The module 'broken' could not be imported; mend this first:")
    assert "No module named 'nothing_like_this'" in said.err
    assert "unstuck/cli" not in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(shop: Cli) -> None:
    shop.folder.chmod(0o500)
    assert "write" in shop.refused(1, "migrate")


def test_a_reader_that_goes_away_is_no_error_worth_a_word(shop: Cli) -> None:
    shop.worker()
    shop.jobs(2_000)
    process = subprocess.Popen(
        [*COMMAND, "jobs", "--limit", "2000"],
        env=shop.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(30)


def test_an_output_that_is_full_is_said_in_one_sentence(shop: Cli) -> None:
    shop.jobs(1)
    for command in (["jobs"], ["jobs", "--json"], ["--help"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*COMMAND, *command], env=shop.environment(), stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 1
        assert done.stderr == b"unstuck: The output cannot be written: No space left on device.\n"


def test_an_argument_of_many_pages_does_not_bury_what_is_said_of_it(shop: Cli) -> None:
    shop.worker()
    refused = shop.run("pause", "x" * 100_000)
    assert refused.code == 1
    assert len(refused.err) < 3_000
    assert refused.err.startswith("unstuck: There is no queue 'xxx")
    assert refused.err.endswith(f"Known: default, scrapes. Ledger: {shop.url}\n")


def test_a_closed_output_stops_nobody(shop: Cli) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "migrate"],
        env=shop.environment(),
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_it_loads_ends_it_without_a_word(shop: Cli) -> None:
    # The first import after the handler is set raises the signal, as an impatient hand would.
    script = (
        "import os, signal, sys\n"
        "class Hand:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'unstuck.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "from unstuck.__main__ import run\n"
        "sys.meta_path.insert(0, Hand())\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
