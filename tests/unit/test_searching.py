"""Look through many jobs for few: nothing is left out, nothing is told twice, and it ends after a while."""

import msgspec
import pytest
from tests.unit.page_kit import job

from unstuck.client.searching import FIRST_SPAN, Found, search
from unstuck.store.records import JobFilter, JobRecord


class Many:
    """Jobs of which few match; every number that is looked at takes its time."""

    def __init__(self, newest: int, matching: list[int], per_id_s: float = 0.0) -> None:
        self.newest = newest
        self.matching = sorted(matching, reverse=True)
        self.per_id_s = per_id_s
        self.now_s = 0.0
        self.asked = 0

    def list_jobs(self, where: JobFilter) -> list[JobRecord]:
        if where == JobFilter(limit=1):
            return [self._job(self.newest)] if self.newest else []
        assert where.before_id is not None
        assert where.from_id is not None
        self.asked += 1
        self.now_s += self.per_id_s * (where.before_id - where.from_id)
        return [self._job(n) for n in self.matching if where.from_id <= n < where.before_id][: where.limit]

    def search(self, where: JobFilter) -> Found:
        return search(self.list_jobs, where, clock=lambda: self.now_s)

    def _job(self, number: int) -> JobRecord:
        return msgspec.structs.replace(job(enqueued_at=0.0, finished_at=None), id=number)


def all_of(many: Many, limit: int) -> tuple[list[int], int]:
    """Turn the pages until there is no next one; give the numbers, and how many pages it took."""
    where, ids, pages = JobFilter(task="rare", limit=limit), [], 0
    while True:
        found = many.search(where)
        ids += [one.id for one in found.jobs]
        pages += 1
        if found.before_id is None:
            return ids, pages
        where = msgspec.structs.replace(where, before_id=found.before_id)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_everything_is_found_once(limit: int) -> None:
    matching = [1, 2, FIRST_SPAN, FIRST_SPAN + 1, 500_000, 999_999, 1_000_000]
    ids, _ = all_of(Many(1_000_000, matching), limit)
    assert ids == sorted(matching, reverse=True)


def test_a_filter_that_nothing_matches_ends_after_a_while_and_says_where_to_go_on() -> None:
    many = Many(10_000_000, [3], per_id_s=1e-6)
    found = many.search(JobFilter(task="rare"))
    assert found.jobs == []
    assert many.now_s < 2.0
    assert found.before_id is not None
    assert 8_000_000 < found.before_id < 9_500_000
    assert all_of(Many(10_000_000, [3], per_id_s=1e-6), 100)[0] == [3]


def test_numbers_that_are_long_gone_are_passed_in_few_steps() -> None:
    many = Many(10_000_000_000, [10_000_000_000])
    assert [one.id for one in many.search(JobFilter(task="rare")).jobs] == [10_000_000_000]
    assert many.asked < 20


def test_where_there_is_nothing_there_is_no_next_page() -> None:
    assert Many(0, []).search(JobFilter()) == Found([], None)
    assert Many(5, [5]).search(JobFilter(limit=1)).before_id is None
