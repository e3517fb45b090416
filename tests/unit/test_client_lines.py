"""Who is gone, and who only seems to be: numbers of connections are used again at once."""

from unstuck.mdp.broker.client_lines import ClientLines


def test_a_client_is_gone_when_its_connection_ends() -> None:
    lines = ClientLines()
    lines.heard(b"a", 7)
    assert lines.settle({7}) == set()
    lines.ended(7)
    assert lines.settle(set()) == {b"a"}
    assert lines.settle(set()) == set()


def test_another_client_on_the_same_number_is_not_gone() -> None:
    lines = ClientLines()
    lines.heard(b"a", 7)
    lines.settle({7})
    # In one round: the first ended, and the second was heard through the number of its connection.
    lines.heard(b"b", 7)
    lines.ended(7)
    assert lines.settle({7}) == {b"a"}
    lines.ended(7)
    assert lines.settle(set()) == {b"b"}


def test_a_client_that_comes_back_through_another_connection_is_there() -> None:
    lines = ClientLines()
    lines.heard(b"a", 7)
    lines.settle({7})
    lines.heard(b"a", 8)
    lines.ended(7)
    assert lines.settle({8}) == set()
    lines.ended(7)
    assert lines.settle({8}) == set()
    lines.ended(8)
    assert lines.settle(set()) == {b"a"}


def test_who_said_something_and_went_in_the_same_round_is_gone() -> None:
    lines = ClientLines()
    lines.heard(b"a", 7)
    lines.ended(7)
    assert lines.settle(set()) == {b"a"}


def test_where_the_connection_is_not_known_nobody_is_ever_gone() -> None:
    lines = ClientLines()
    lines.heard(b"a", None)
    lines.ended(7)
    assert lines.settle(set()) == set()
