"""What the doctor finds on PostgreSQL alone: clocks, the bell, poolers, vacuum and what holds it back."""

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from tests.support.backdoor import PostgresBackdoor
from tests.support.builders import birth
from tests.support.doctor import CALM, codes
from tests.support.fleet import wait_for
from tests.support.network_proxy import Proxy

from unstuck import config
from unstuck.client.doctor.diagnose import diagnose
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Thresholds, gather
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger


class FalsePid(Proxy):
    """A pooler as far as a client can tell: it names a process of its own as the backend."""

    def filter_answers(self) -> Callable[[bytes], bytes]:
        backend_key = b"K\x00\x00\x00\x0c"

        def changed(data: bytes) -> bytes:
            before, key, after = data.partition(backend_key)
            return before + key + (1).to_bytes(4, "big") + after[4:] if key else data

        return changed


@pytest.fixture
def settings(pg_url: str) -> config.Settings:
    return config.build({"url": pg_url})


@pytest.fixture
def pg(settings: config.Settings) -> Iterator[Ledger]:
    ledger = open_ledger(settings)
    ledger.migrate()
    yield ledger
    ledger.close()


def test_this_hosts_clock_is_wrong(pg: Ledger, settings: config.Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    right = time.time
    for off_s in (90.0, -90.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: right() + off_s)
        finding = next(one for one in examine(gather(pg, settings)) if one.code == "clock-differs")
        assert finding.facts["off_s"] == pytest.approx(off_s, abs=5)
    monkeypatch.undo()
    assert codes(pg, settings) == set()


def test_the_clock_of_a_workers_host_is_wrong(pg: Ledger, settings: config.Settings) -> None:
    pg.workers.register(birth("w1", host="elsewhere", metadata={"clock_at": time.time()}, **CALM))
    assert "clock-differs" not in codes(pg, settings)
    pg.workers.register(birth("w2", host="far-away", metadata={"clock_at": time.time() - 90}, **CALM))
    [finding] = [one for one in examine(gather(pg, settings)) if one.code == "clock-differs"]
    assert finding.facts["host"] == "far-away"


def test_wake_ups_are_off_or_rung_elsewhere(pg: Ledger, pg_url: str, pg_server: Any) -> None:
    off = config.build({"url": pg_url, "notify": False})
    assert "notify-off" in {finding.code for finding in diagnose(off)}
    other = pg_server.new_database()
    try:
        lost = diagnose(config.build({"url": pg_url, "listen_url": other}))
        assert "notify-silent" in {finding.code for finding in lost}
        same = diagnose(config.build({"url": pg_url, "listen_url": pg_url}))
        assert same == []
    finally:
        pg_server.drop_database(other)


def test_a_pooler_stands_between(pg: Ledger, pg_url: str) -> None:
    with FalsePid(pg_url) as pooler:
        blind = {finding.code for finding in diagnose(config.build({"url": pooler.url}))}
        assert blind >= {"pooler", "pooler-without-listen-url"}
        seeing = {finding.code for finding in diagnose(config.build({"url": pooler.url, "listen_url": pg_url}))}
        assert seeing == {"pooler"}
        circle = {finding.code for finding in diagnose(config.build({"url": pg_url, "listen_url": pooler.url}))}
        assert "notify-silent" in circle


def test_dead_rows_and_an_autovacuum_that_is_off(pg: Ledger, settings: config.Settings, pg_url: str) -> None:
    # Each on a connection of its own: a session tells the server what it counted when it ends.
    meddler = PostgresBackdoor(pg_url)
    meddler.rows("alter table jobs set (autovacuum_enabled = off)")
    meddler.rows("update migrations set applied_at = applied_at - interval '1 hour'")
    meddler.rows(
        "insert into jobs (id, queue, task, payload, enqueued_at, finished_at, ready, scheduled, state)"
        " select n, 'default', 'add', '', now(), now(), false, false, 'succeeded' from generate_series(1, 6000) n"
    )
    meddler.rows("update jobs set attempt = 1")
    meddler.rows("update jobs set attempt = 2")
    limits = Thresholds(dead_rows=5_000)
    wait_for(lambda: "dead-rows" in codes(pg, settings, limits), "the server to count its dead rows")
    assert "autovacuum-off" in codes(pg, settings, limits)
    assert "dead-rows" not in codes(pg, settings)
    meddler.rows("vacuum jobs")
    meddler.rows("alter table jobs reset (autovacuum_enabled)")
    wait_for(lambda: codes(pg, settings, limits) == set(), "the doctor to be content")


def test_an_old_snapshot(pg: Ledger, settings: config.Settings, pg_url: str) -> None:
    limits = Thresholds(snapshot_s=0.2)
    with psycopg.connect(pg_url, application_name="a report") as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from unstuck.jobs")
        wait_for(lambda: "old-snapshot" in codes(pg, settings, limits), "the snapshot to be old")
        [finding] = [one for one in examine(gather(pg, settings, limits), limits) if one.code == "old-snapshot"]
        assert finding.facts["name"] == str(reader.info.backend_pid)
        assert "a report" in finding.what
        assert "old-snapshot" not in codes(pg, settings)
    assert "old-snapshot" not in codes(pg, settings, limits)


def test_a_prepared_transaction_that_nobody_ends(pg: Ledger, settings: config.Settings, pg_url: str) -> None:
    limits = Thresholds(snapshot_s=0.2)
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("begin")
        connection.execute("update unstuck.queues set paused = paused")
        connection.execute("select pg_current_xact_id()")
        connection.execute("prepare transaction 'a transfer'")
    try:
        # Whoever prepared it is gone, and it stays.
        wait_for(lambda: "old-snapshot" in codes(pg, settings, limits), "the transaction to be old")
        [finding] = [one for one in examine(gather(pg, settings, limits), limits) if one.code == "old-snapshot"]
        assert (finding.facts["kind"], finding.facts["name"]) == ("prepared", "a transfer")
        assert "ROLLBACK PREPARED 'a transfer'" in finding.cure
        assert "old-snapshot" not in codes(pg, settings)
    finally:
        PostgresBackdoor(pg_url).rows("rollback prepared 'a transfer'")
    assert codes(pg, settings, limits) == set()


def test_a_replication_slot_that_nobody_reads(pg: Ledger, settings: config.Settings, pg_url: str) -> None:
    meddler = PostgresBackdoor(pg_url)
    with standby(meddler, "a_standby"):
        # Its reader is there and up to date: nothing is wrong.
        wait_for(lambda: slots(meddler) == [("a_standby", True)], "the slot to keep what its reader needs")
        assert codes(pg, settings) == set()
    try:
        wait_for(lambda: slots(meddler) == [("a_standby", False)], "its reader to be gone")
        [finding] = [one for one in examine(gather(pg, settings)) if one.code == "old-snapshot"]
        assert (finding.facts["kind"], finding.facts["name"]) == ("slot", "a_standby")
        assert "is used by nobody" in finding.what
        assert "pg_drop_replication_slot('a_standby')" in finding.cure
    finally:
        meddler.rows("select pg_drop_replication_slot('a_standby')")
    assert codes(pg, settings) == set()


def test_a_replication_slot_whose_reader_lags(pg: Ledger, settings: config.Settings, pg_url: str) -> None:
    meddler = PostgresBackdoor(pg_url)
    with standby(meddler, "a_slow_standby"):
        wait_for(lambda: slots(meddler) == [("a_slow_standby", True)], "the slot to keep what its reader needs")
        for _ in range(20):
            meddler.rows("select pg_current_xact_id()")
        limits = Thresholds(slot_behind_xacts=10)
        [finding] = [one for one in examine(gather(pg, settings, limits), limits) if one.code == "old-snapshot"]
        assert "lags behind" in finding.what
        assert finding.facts["behind_xacts"] > 10
        assert codes(pg, settings) == set()
    wait_for(lambda: slots(meddler) == [("a_slow_standby", False)], "its reader to be gone")
    meddler.rows("select pg_drop_replication_slot('a_slow_standby')")


def slots(meddler: PostgresBackdoor) -> list[tuple[str, bool]]:
    """Give the slots that hold vacuum back, and whether anybody reads them."""
    return [
        tuple(row) for row in meddler.rows("select slot_name, active from pg_replication_slots where xmin is not null")
    ]  # type: ignore[misc]


@contextmanager
def standby(meddler: PostgresBackdoor, slot: str) -> Iterator[None]:
    """Read the server's WAL as a standby with `hot_standby_feedback` does, and ask it to keep what we see now."""
    meddler.rows(f"select pg_create_physical_replication_slot('{slot}')")
    [(lsn, xmin)] = meddler.rows(
        "select pg_current_wal_flush_lsn()::text, pg_snapshot_xmin(pg_current_snapshot())::text"
    )
    reader = psycopg.pq.PGconn.connect(f"{meddler.url}?replication=true".encode())
    try:
        answer = reader.exec_(f"START_REPLICATION SLOT {slot} PHYSICAL {lsn}".encode())
        assert answer.status == psycopg.pq.ExecStatus.COPY_BOTH, answer.error_message
        # Hot standby feedback: our time, then xmin and catalog xmin, each with its epoch.
        reader.put_copy_data(struct.pack(">cqIIII", b"h", 0, int(xmin) & 0xFFFFFFFF, int(xmin) >> 32, 0, 0))
        reader.flush()
        yield
    finally:
        reader.finish()
