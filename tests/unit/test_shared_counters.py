"""Limits that several processes share: what one of them counts, the others see."""

from unstuck.http.auth.limits import ConcurrencyLimit, RateLimiter
from unstuck.http.auth.shared_counters import Member, ServerGroup


def test_a_bucket_is_one_for_all_processes() -> None:
    group, now = ServerGroup(2), [100.0]
    one, two = (RateLimiter(1, 4, lambda: now[0], shared=group.rates) for _ in range(2))
    assert [rates.take("a") for rates in (one, two, one, two)] == [0.0] * 4
    assert one.take("a") > 0
    assert two.take("a") > 0
    assert two.take("b") == 0.0
    now[0] += 2
    assert [rates.take("a") for rates in (one, two)] == [0.0, 0.0]
    assert one.take("a") > 0


def test_open_requests_count_in_all_processes_and_go_with_theirs() -> None:
    group = ServerGroup(2)
    one, two = (ConcurrencyLimit(4, 2, Member(group, number)) for number in range(2))
    with one.place_for("a"):
        assert not two.is_full("a")
        with two.place_for("a"):
            assert one.is_full("a")
            assert two.is_full("a")
            assert not two.is_full("b")
        assert not one.is_full("a")
        assert group.open_requests is not None
        group.open_requests.clear(0)
        assert not two.is_full("a")
        with two.place_for("b"), two.place_for("c"), two.place_for("d"), two.place_for("e"):
            assert one.is_full("z")


def test_one_process_shares_nothing() -> None:
    assert ServerGroup().rates is None
    assert ServerGroup().open_requests is None
