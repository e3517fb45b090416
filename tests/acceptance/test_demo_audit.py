"""A demo that could not find a loss would prove nothing: here the audit is shown losses, and finds them."""

import time
from pathlib import Path

import pytest
from tests.acceptance.shop import Shop

from unstuck.cli.demo_audit import Audit, audit
from unstuck.store.records import Held


class Witness:
    """One job that was run in order, and the record beside the ledger."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        self.shop = shop
        self.record = folder / "record"
        self.lines: list[str] = []
        shop.worker()

    def running(self, task: str = "add") -> Held:
        self.shop.jobs(task=task)
        [held] = self.shop.claim(start=True)
        return held

    def wrote(self, word: str, job_id: int, mark: str = "aa", at: float | None = None) -> None:
        self.lines.append(f"{word} {job_id} {mark} {time.time() if at is None else at:.6f}")

    def audit(self, *job_ids: int) -> Audit:
        self.record.write_text("".join(f"{line}\n" for line in self.lines))
        with self.shop.ledger() as ledger:
            return audit(ledger, job_ids, self.record)


@pytest.fixture
def witness(shop: Shop, tmp_path: Path) -> Witness:
    return Witness(shop, tmp_path)


def succeeded(witness: Witness) -> int:
    held = witness.running()
    witness.wrote("begun", held.job_id)
    witness.wrote("ended", held.job_id)
    witness.shop.succeed(held, b'"aa"')
    return held.job_id


def test_a_job_in_order_is_a_success(witness: Witness) -> None:
    found = witness.audit(succeeded(witness))
    assert (found.succeeded, found.lost, found.twice) == (1, {}, {})


def test_a_job_that_vanished_is_lost(witness: Witness) -> None:
    found = witness.audit(succeeded(witness), 4711)
    assert found.lost == {4711: "is not in the ledger"}


def test_a_job_that_never_ended_is_lost(witness: Witness) -> None:
    [waiting] = witness.shop.jobs()
    assert witness.audit(waiting).lost == {waiting: "add is still pending"}


def test_a_success_that_never_ran_to_its_end_is_lost(witness: Witness) -> None:
    held = witness.running()
    witness.wrote("begun", held.job_id)
    witness.shop.succeed(held, b'"aa"')
    assert "never ran to its end" in witness.audit(held.job_id).lost[held.job_id]


def test_a_failure_that_no_rule_allows_is_lost(witness: Witness) -> None:
    held = witness.running()
    witness.shop.fail(held)
    assert "its rules do not allow" in witness.audit(held.job_id).lost[held.job_id]


def test_a_job_begun_again_after_its_success_is_finished_twice(witness: Witness) -> None:
    job_id = succeeded(witness)
    witness.wrote("begun", job_id, "bb", time.time() + 60)
    assert witness.audit(job_id).twice == {job_id: "add was begun again after its success"}


def test_two_ends_without_a_crash_are_finished_twice(witness: Witness) -> None:
    job_id = succeeded(witness)
    began = time.time() - 60
    witness.wrote("begun", job_id, "bb", began)
    witness.wrote("ended", job_id, "bb", began + 1)
    assert "with 0 crashes to explain it" in witness.audit(job_id).twice[job_id]
