"""A ledger in the memory of one process, for its threads, and for nobody else."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.builders import QUEUE, TASK, birth, claim_jobs, done, new_job, put, run, turn

from unstuck import config
from unstuck.config import IN_MEMORY, Settings
from unstuck.errors import ConfigError, LedgerError, LedgerUnavailable, NoLedger, RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, ReplyAddress, Success, Turn
from unstuck.ledger.open import open_ledger, ready_ledger
from unstuck.ledger.sqlite.ledger import SqliteLedger

LETTER = ReplyAddress(b"client-0123456789", "echo", "r1")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = ready_ledger(Settings(url=IN_MEMORY))
    ledger.workers.register(birth("w1", suspect_after_s=600, running_stale_after_s=600))
    yield ledger
    ledger.close()


def test_only_who_asks_for_it_in_so_many_words_gets_one() -> None:
    with pytest.raises(ConfigError, match="cannot be shared"):
        config.load({"url": IN_MEMORY})
    assert replace(config.load({}), url=IN_MEMORY).url == IN_MEMORY


def test_it_begins_empty_and_each_is_its_own() -> None:
    one, two = open_ledger(Settings(url=IN_MEMORY)), open_ledger(Settings(url=IN_MEMORY))
    with pytest.raises(NoLedger):
        one.check_schema()
    assert one.migrate()
    one.check_schema()
    put(one)
    two.migrate()
    assert (one.jobs.count(), two.jobs.count()) == ({"pending": 1}, {})
    assert one.describe()["path"] == ":memory:"
    assert one.diagnose(far_s=1, late_s=1).size_bytes > 0
    for ledger in (one, two):
        ledger.close()
    with pytest.raises(LedgerError, match="is gone"):
        one.jobs.count()


def test_no_file_is_made(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = ready_ledger(Settings(url=IN_MEMORY))
    put(ledger)
    ledger.workers.listen("w1").close()
    ledger.workers.listen_all().close()
    ledger.close()
    assert os.listdir(tmp_path) == []


def test_a_refused_write_is_rolled_back_and_the_next_goes_through(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.jobs.enqueue([new_job(), new_job(unique_key="nul\0")])
    assert ledger.jobs.count() == {}
    put(ledger)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.maintenance.prune(0.0) == 1


def test_the_bell_rings_in_it(ledger: Ledger) -> None:
    bell = ledger.workers.listen("w1")
    try:
        ledger.notify([f"queue:{QUEUE}"])
        assert bell.wait(20.0) == {f"queue:{QUEUE}"}
    finally:
        bell.close()


def test_many_threads_share_it(ledger: Ledger) -> None:
    """Brokers and readers side by side: every job is handed out once, and nobody sees half of an exchange."""
    rounds, threads_count, at_once = 40, 4, 5
    handed: list[int] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def serve(worker_id: str) -> None:
        try:
            ledger.workers.register(birth(worker_id, suspect_after_s=600, running_stale_after_s=600))
            hands: list[int] = []
            finished: tuple[Success, ...] = ()
            for _ in range(rounds):
                answer = ledger.workers.exchange(
                    Exchange(
                        jobs=(new_job(),) * at_once,
                        reply_addresses=(LETTER,) * at_once,
                        turns=(
                            Turn(
                                worker_id,
                                done=finished,
                                claim_request=ClaimRequest((QUEUE,), (TASK,), at_once, start=at_once),
                            ),
                        ),
                    )
                )
                assert answer.turns is not None
                assert not answer.turns[0].superseded
                finished = tuple(done(job) for job in answer.turns[0].claimed)
                hands += [job.job_id for job in answer.turns[0].claimed]
            handed.extend(hands)
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        try:
            while not stop.is_set():
                assert sum(ledger.jobs.count().values()) % at_once == 0
        except BaseException as error:
            errors.append(error)

    looking = threading.Thread(target=look)
    serving = [threading.Thread(target=serve, args=(f"t{n}",)) for n in range(threads_count)]
    for thread in (looking, *serving):
        thread.start()
    for thread in serving:
        thread.join()
    stop.set()
    looking.join()
    assert errors == []
    assert len(handed) == len(set(handed)) == rounds * threads_count * at_once


def test_who_waits_for_too_long_is_told_so(ledger: SqliteLedger) -> None:
    ledger.db.patience_s = 0.1
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with ledger.db.write():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(LedgerUnavailable):
        ledger.jobs.count()
    leave.set()
    thread.join()
    assert ledger.jobs.count() == {}


def test_the_child_of_a_fork_is_told_that_it_is_not_its_own(ledger: Ledger) -> None:
    put(ledger)
    pid = os.fork()
    if pid == 0:
        try:
            ledger.jobs.count()
        except LedgerError as error:
            os._exit(0 if "another process" in str(error) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The parent goes on with it.
    assert len(claim_jobs(ledger)) == 1
